"""Cases that anybody can point this at: `python -m tests.cases FOLDER`.

FOLDER/golden_ids.json: conversations with the ids and masks that are right, for the tokenizers in FOLDER/tokenizers
(`directory|template`, the template from FOLDER/templates or the tokenizer's `own`).
FOLDER/found/*/: one case a folder: input files beside an `expected.json` that says what is right (see `expectations`
for the words that it understands), perhaps a server.py that answers as some API does.

Everything goes through the stages' own command lines; the table says what differs. Exit code 1 when anything does.
"""
