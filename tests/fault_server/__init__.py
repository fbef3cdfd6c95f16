"""A server that answers like llama.cpp, SGLang, vLLM or OpenRouter, and misbehaves as told.

Answers are a function of the prompt ids and the fleet's seed alone (`answers.Answers`), so a test recomputes the
exact ids that a corpus must hold, whichever server answered, at whichever attempt. Faults are drawn per request
from the seed, the server's name, the prompt and how often that prompt came here: the same run meets the same faults
in whatever order its requests arrive.

    python -m tests.fault_server --port 8101 --seed 7 --faults abort_200=0.02,502_html=0.05 --log served.jsonl

The log has one line per finished generation: digest of the prompt ids, digest and number of the output ids, the
fault, and whether the reply went out whole. `POST /control` changes a running server: `{"hang": true}`,
`{"faults": {...}}`, `{"tokens_per_second": 50}`, `{"die": true}`.
"""
