"""Text from bytes of tokens is the text that `tokenizers` gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scripts.lib.target.byte_level import TokenBytes, token_bytes
from tests.families import FAMILIES, target


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte and every two bytes of UTF-8's kinds as tokens, and added ones with and without the alphabet's letters."""
    model = target("qwen3")._backend
    assert model is not None
    tokenizer = Tokenizer.from_str(model.to_str())
    tokenizer.add_tokens([AddedToken(text) for text in ("a b", "é", "Ġ", "｜x", "\n", "<x>", "Ġ é")])
    return tokenizer


@settings(deadline=None, max_examples=500)
@given(data=st.data())
def test_same_text_as_tokenizers(tokenizer: Tokenizer, data: st.DataObject):
    known = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    single = [token for token in known if len(tokenizer.id_to_token(token)) == 1]  # bytes: torn characters
    ids = data.draw(st.lists(st.sampled_from(known) | st.sampled_from(single) | st.just(999_999), max_size=40))
    assert TokenBytes(tokenizer).text(ids) == tokenizer.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=500)
@given(raw=st.binary(max_size=12))
def test_bytes_that_are_no_text(tokenizer: Tokenizer, raw: bytes):
    table = TokenBytes(tokenizer)
    of = {table[token]: token for token in tokenizer.get_vocab().values() if len(table[token]) == 1}
    ids = [of[bytes([byte])] for byte in raw]
    assert table.text(ids) == tokenizer.decode(ids, skip_special_tokens=False) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_of_families(name: str):
    model = target(name)
    assert model._bytes is not None
    assert model._backend is not None
    ids = [*FAMILIES[name].tokens.values()]
    assert model.decode(ids) == model._backend.decode(ids, skip_special_tokens=False)


def test_other_tokenizers_have_no_table():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    assert token_bytes(tokenizer) is None
    tokenizer.decoder = decoders.Metaspace()
    assert token_bytes(tokenizer) is None
