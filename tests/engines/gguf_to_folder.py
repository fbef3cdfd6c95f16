"""Turn the embedded GGUF model into a Hugging Face folder, which SGLang and vLLM read.

    python gguf_to_folder.py MODEL.gguf FOLDER

Runs in a server environment: it needs torch.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, folder: Path) -> None:
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # The weights are plain bfloat16 by now, but transformers (5.19) still believes that they are quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
