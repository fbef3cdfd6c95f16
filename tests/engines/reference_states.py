"""How far stored hidden states are from those that transformers computes, as JSON.

    python reference_states.py MODEL FILE...

Runs in a server environment: it needs torch. Prints, for each file and each stored state, the median over
the tokens of |stored - computed| / |computed|: for every state of the model, and for the nearest one with
the rows moved by one token.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main(folder: str, files: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    size = model.config.hidden_size
    found = []
    for file in files:
        stored = load_file(file)
        with torch.no_grad():
            computed = model(stored["input_ids"][None], output_hidden_states=True).hidden_states
        computed = [state[0].float() for state in computed]
        for name in ("aux_hidden_state", "hidden_state"):
            assert stored[name].dtype == torch.bfloat16
            for state in stored[name].float().split(size, dim=1):
                distances = [distance(state, other) for other in computed]
                nearest = computed[distances.index(min(distances))]
                moved = distance(state.roll(1, 0), nearest)
                found.append({"file": file, "tensor": name, "distances": distances, "moved": moved})
    json.dump(found, sys.stdout)


def distance(stored: torch.Tensor, computed: torch.Tensor) -> float:
    return ((stored - computed).norm(dim=1) / computed.norm(dim=1)).median().item()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
