import pytest

from adrl_jax.models import chat, tokenizer

CHATML = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + ' ' + m['content'] + '<eos>' + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant ' }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def letters():
    return tokenizer.CharTokenizer("abcdefghijklmnopqrstuvwxyz ", chat_template=CHATML)


def test_conversation(letters):
    assert letters.chat([USER]) == "<bos>user hi<eos> <bos>assistant "
    assert letters.chat([USER], add_generation_prompt=False) == "<bos>user hi<eos> "


def test_special_tokens_are_known_to_the_template():
    tok = tokenizer.CharTokenizer("ab", chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}")
    assert tok.chat([USER]) == "<bos>|<eos>|<pad>"


def test_whitespace_control_and_loop_controls_are_those_of_hugging_face():
    template = "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    assert chat.render(template, [USER, USER]) == "hi\nend"


def test_tojson_keeps_letters():
    assert chat.render("{{ messages[0].content | tojson }}", [{"role": "user", "content": 'é<"'}]) == '"é<\\""'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "the chat template failed"),
        ("{{ messages.__class__.__mro__ }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ nothing.field }}", "the chat template failed"),
    ],
)
def test_failures_are_value_errors(template, message):
    with pytest.raises(ValueError, match=message):
        chat.render(template, [USER])


@pytest.mark.parametrize("messages", [["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_malformed_messages(messages):
    with pytest.raises(ValueError, match=r"messages\[0\].*'role' and 'content'"):
        chat.render(CHATML, messages)


def test_no_template():
    with pytest.raises(ValueError, match="'digits' has no chat template"):
        tokenizer.CharTokenizer("01", name="digits").chat([USER])


class TestSupervised:
    def test_the_reply_and_its_end_token_only(self, letters):
        prompt, reply = chat.supervised_ids(letters, [USER, {"role": "assistant", "content": "yo"}])
        assert letters.decode(prompt, skip_special=False) == "<bos>user hi<eos> <bos>assistant "
        assert letters.decode(reply, skip_special=False) == "yo<eos>"

    def test_several_turns(self, letters):
        turns = [USER, {"role": "assistant", "content": "yo"}, USER, {"role": "assistant", "content": "bye"}]
        prompt, reply = chat.supervised_ids(letters, turns)
        assert letters.decode(reply, skip_special=False) == "bye<eos>"
        assert "yo<eos>" in letters.decode(prompt, skip_special=False)

    def test_the_last_turn_must_be_the_assistants(self, letters):
        with pytest.raises(ValueError, match="role 'assistant'"):
            chat.supervised_ids(letters, [USER])

    def test_an_empty_reply(self, letters):
        with pytest.raises(ValueError, match="empty"):
            chat.supervised_ids(letters, [USER, {"role": "assistant", "content": ""}])

    def test_a_template_without_an_end_token(self):
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tok = tokenizer.CharTokenizer("hiyo", chat_template=template)
        with pytest.raises(ValueError, match="no end token"):
            chat.supervised_ids(tok, [USER, {"role": "assistant", "content": "yo"}])

    def test_a_template_that_does_not_continue_its_prompt(self):
        template = "{% if add_generation_prompt %}hi{% endif %}{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
        tok = tokenizer.CharTokenizer("hiyo", chat_template=template)
        with pytest.raises(ValueError, match="does not continue"):
            chat.supervised_ids(tok, [USER, {"role": "assistant", "content": "yo"}])
