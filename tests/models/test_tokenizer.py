import json

import gguf
import numpy as np
import pytest
import tokenizers

from adrl_jax.models import bpe, gguf_file, tokenizer

TEXTS = (
    "The quick brown fox",
    "  two  spaces\n\n\nand\ttabs ",
    "don't they'll 1234567 x**2",
    "naïve café 日本語 🙂👩‍👩‍👧",
    "<|turn|>the<|end|>",
    "",
)


@pytest.fixture
def folder(trained_bpe, tmp_path):
    trained_bpe.save(str(tmp_path / "tokenizer.json"))
    config = dict(eos_token="<|end|>", bos_token={"content": "<|turn|>"}, chat_template="{{ messages[0].content }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write_json(path, value):
    path.write_text(json.dumps(value))


class TestFromFile:
    def test_ids_are_those_of_the_library(self, folder, trained_bpe):
        tok = tokenizer.from_file(folder)
        for text in TEXTS:
            ids = tok.encode(text)
            assert ids.dtype == np.int32
            assert ids.tolist() == trained_bpe.encode(text).ids
            assert tok.decode(ids, skip_special=False) == text

    def test_special_tokens(self, folder):
        tok = tokenizer.from_file(folder)
        assert (tok.size, tok.eos_ids, tok.bos_id, tok.pad_id) == (340, (0,), 1, 0)
        assert tok.encode("the", add_bos=True).tolist() == [1, *tok.encode("the")]
        assert tok.decode([1, *tok.encode("the"), 0]) == "the"
        assert tok.chat([{"role": "user", "content": "x"}]) == "x"

    def test_the_file_itself_may_be_named(self, folder):
        assert tokenizer.from_file(folder / "tokenizer.json").fingerprint() == tokenizer.from_file(folder).fingerprint()

    @pytest.mark.parametrize(("value", "expected"), [([0, 2], (0, 2)), (2, (2,)), (None, (5,))])
    def test_generation_config_names_the_end_tokens(self, folder, value, expected):
        write_json(folder / "config.json", dict(eos_token_id=5, pad_token_id=7))
        write_json(folder / "generation_config.json", dict(eos_token_id=value))
        tok = tokenizer.from_file(folder)
        assert tok.eos_ids == expected
        assert tok.pad_id == 7

    @pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id", "bos_token_id"])
    def test_special_ids_past_the_vocabulary(self, folder, field):
        write_json(folder / "generation_config.json", {"eos_token_id": [0], field: 340})
        with pytest.raises(ValueError, match=r"token id 340 is outside tokenizer .* of size 340"):
            tokenizer.from_file(folder)

    def test_special_token_that_is_no_token(self, folder):
        write_json(folder / "tokenizer_config.json", dict(eos_token="</s>"))
        with pytest.raises(ValueError, match="eos_token='</s>' is not a token"):
            tokenizer.from_file(folder)

    def test_no_end_token(self, folder):
        write_json(folder / "tokenizer_config.json", {})
        with pytest.raises(ValueError, match="names no end token"):
            tokenizer.from_file(folder)

    def test_added_tokens_count(self, folder):
        raw = json.loads((folder / "tokenizer.json").read_text())
        added = dict(special=False, lstrip=False, rstrip=False, normalized=False, single_word=False)
        raw["added_tokens"].append(dict(added, id=350, content="<extra>"))
        write_json(folder / "tokenizer.json", raw)
        tok = tokenizer.from_file(folder)
        highest = int(tok.encode("<extra>")[0])
        assert tok.size == highest + 1 > 340

    def test_padding_and_truncation_of_the_file_are_switched_off(self, folder, trained_bpe):
        cut = tokenizers.Tokenizer.from_str(trained_bpe.to_str())
        cut.enable_truncation(4)
        cut.enable_padding(length=8)
        cut.save(str(folder / "tokenizer.json"))
        assert tokenizer.from_file(folder).encode(TEXTS[0]).tolist() == trained_bpe.encode(TEXTS[0]).ids

    def test_template_in_its_own_file_or_in_a_list(self, folder):
        write_json(
            folder / "tokenizer_config.json", dict(eos_token="<|end|>", chat_template=[dict(name="default", template="D")])
        )
        assert tokenizer.from_file(folder).chat_template == "D"
        (folder / "chat_template.jinja").write_text("F")
        assert tokenizer.from_file(folder).chat_template == "F"

    def test_missing_and_damaged(self, folder):
        with pytest.raises(FileNotFoundError, match="elsewhere: absent"):
            tokenizer.from_file(folder / "elsewhere")
        (folder / "tokenizer.json").write_text('{"model": 3}')
        with pytest.raises(ValueError, match="damaged or not a tokenizer"):
            tokenizer.from_file(folder)

    def test_save_and_load(self, folder, tmp_path):
        tok = tokenizer.from_file(folder)
        tok.save(tmp_path / "again")
        again = tokenizer.from_file(tmp_path / "again")
        for field in ("size", "eos_ids", "pad_id", "bos_id", "chat_template"):
            assert getattr(again, field) == getattr(tok, field), field
        assert again.fingerprint() == tok.fingerprint()

    @pytest.mark.parametrize("i", [-1, 340])
    def test_ids_that_are_not_the_tokenizers(self, folder, i):
        with pytest.raises(ValueError, match=rf"token id {i} is outside .* of size 340"):
            tokenizer.from_file(folder).decode([1, i])


def gguf_file_of(path, tokens, types, **fields) -> gguf_file.GgufFile:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_file.GgufFile(path)


class TestFromGguf:
    @pytest.fixture
    def parts(self, trained_bpe):
        raw = json.loads(trained_bpe.to_str())["model"]
        tokens = [token for token, _ in sorted(raw["vocab"].items(), key=lambda item: item[1])]
        return tokens, [3 if i < 2 else 1 for i in range(len(tokens))], [" ".join(pair) for pair in raw["merges"]]

    def build(self, tmp_path, parts, **fields):
        tokens, types, merges = parts
        fields = dict(tokenizer_model="gpt2", tokenizer_pre="gpt-2", token_merges=merges, eos_token_id=0) | fields
        return gguf_file_of(tmp_path / "t.gguf", tokens, types, **fields)

    def test_the_rebuilt_tokenizer_gives_the_same_ids(self, tmp_path, parts, trained_bpe):
        tok = tokenizer.from_gguf(self.build(tmp_path, parts, name="tiny"))
        assert tok.name == "tiny" and tok.size == 340
        for text in TEXTS:
            assert tok.encode(text).tolist() == trained_bpe.encode(text).ids
            assert tok.decode(tok.encode(text), skip_special=False) == text

    def test_special_tokens_and_template(self, tmp_path, parts):
        fields = dict(eot_token_id=1, pad_token_id=0, bos_token_id=1, chat_template="{{ bos_token }}")
        tok = tokenizer.from_gguf(self.build(tmp_path, parts, **fields))
        assert (tok.eos_ids, tok.pad_id, tok.bos_id) == ((0, 1), 0, 1)
        assert tok.chat([]) == "<|turn|>"
        assert tok.encode("<|turn|>").tolist() == [1]
        assert tok.decode([1, 0]) == ""

    def test_special_id_past_the_vocabulary(self, tmp_path, parts):
        with pytest.raises(ValueError, match="token id 340 is outside tokenizer"):
            tokenizer.from_gguf(self.build(tmp_path, parts, eos_token_id=340))

    def test_unknown_kinds(self, tmp_path, parts):
        with pytest.raises(ValueError, match=r"tokenizer.ggml.model='t5' is not supported; choose gpt2 or llama"):
            tokenizer.from_gguf(self.build(tmp_path, parts, tokenizer_model="t5"))
        with pytest.raises(ValueError, match="pre-tokenizer 'deepseek' is not supported; choose one of gpt-2, smollm"):
            tokenizer.from_gguf(self.build(tmp_path, parts, tokenizer_pre="deepseek"))

    def test_sentencepiece_scores(self, tmp_path):
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "c", "ab", "bc", "▁a"]
        types = [2, 3, 3, *[6] * 256, *[1] * 7]
        scores = [0.0] * 263 + [-1.0, -2.0, -3.0]
        fields = dict(tokenizer_model="llama", token_scores=scores, eos_token_id=2, bos_token_id=1)
        tok = tokenizer.from_gguf(gguf_file_of(tmp_path / "t.gguf", tokens, types, **fields))
        spelled = [tokens[i] for i in tok.encode("abc é")]
        assert spelled == ["▁", "ab", "c", "▁", "<0xC3>", "<0xA9>"]  # "ab" outranks "bc" and "▁a"
        assert tok.decode(tok.encode("abc é")) == "abc é"


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("gpt-2", ["IT", "'", "S", " 12345", "  ", " don", "'t", "!!", "\n", "\n", "x"]),
        ("smollm", ["IT", "'", "S", " ", *"12345", "  ", " don", "'t", "!!", "\n", "\n", "x"]),
        ("qwen2", ["IT", "'S", " ", *"12345", "  ", " don", "'t", "!!\n\n", "x"]),
        ("llama-bpe", ["IT", "'S", " ", "123", "45", "  ", " don", "'t", "!!\n\n", "x"]),
    ],
)
def test_how_text_is_cut(cut, expected):
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tok = bpe.byte_level(sorted(alphabet), [1] * len(alphabet), [], cut)
    text = "IT'S 12345   don't!!\n\nx"
    assert [text[start:end] for _, (start, end) in tok.pre_tokenizer.pre_tokenize_str(text)] == expected


class TestCharTokenizer:
    def test_ids(self):
        tok = tokenizer.CharTokenizer("0123456789+= ")
        assert (tok.pad_id, tok.eos_ids, tok.bos_id, tok.size) == (0, (1,), 2, 16)
        assert tok.encode("01=").tolist() == [3, 4, 14]
        assert tok.encode("0", add_bos=True).tolist() == [2, 3]
        assert tok.decode([2, 3, 4, 1, 0]) == "01"
        assert tok.decode([2, 3, 1], skip_special=False) == "<bos>0<eos>"
        assert tok.encode("<bos>0<eos>").tolist() == [2, 3, 1]

    def test_bad_input(self):
        with pytest.raises(ValueError, match="empty"):
            tokenizer.CharTokenizer("")
        with pytest.raises(ValueError, match=r"twice: \['a'\]"):
            tokenizer.CharTokenizer("aba")
        with pytest.raises(ValueError, match="'x' is not in the alphabet"):
            tokenizer.CharTokenizer("ab").encode("ax")
        with pytest.raises(ValueError, match="token id 5 is outside"):
            tokenizer.CharTokenizer("ab").decode([5])

    def test_save_and_load(self, tmp_path):
        tok = tokenizer.CharTokenizer("ab \n\t(", chat_template="{{ messages }}")
        tok.save(tmp_path)
        again = tokenizer.from_file(tmp_path)
        for text in ("a b\n\n\t((", "<bos>ab<eos>", ""):
            assert again.encode(text).tolist() == tok.encode(text).tolist()
            assert again.decode(tok.encode(text), skip_special=False) == text
        for field in ("size", "eos_ids", "pad_id", "bos_id", "chat_template"):
            assert getattr(again, field) == getattr(tok, field), field


def test_models_that_must_share_ids_are_compared(folder):
    digits = tokenizer.CharTokenizer("0123456789", name="digits")
    tokenizer.check_same(digits, tokenizer.CharTokenizer("0123456789", name="others"))
    with pytest.raises(ValueError, match=r"'digits' \(size 13\) and 'letters' \(size 13\)"):
        tokenizer.check_same(digits, tokenizer.CharTokenizer("abcdefghij", name="letters"))
    with pytest.raises(ValueError, match="'digits'"):
        tokenizer.check_same(digits, tokenizer.from_file(folder))
