from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.api.text.chat_template import ChatTemplate
from tandem.base.errors import ConfigurationError, InvalidRequest

HELLO = [{"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"})


def test_blocks_leave_no_whitespace_and_special_tokens_are_known() -> None:
    source = "{{ bos_token }}\n{% for m in messages %}\n  {% if true %}\n[{{ m.role }}] {{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert template(source).render(HELLO) == "<s>\n[user] hello\n"


def test_the_generation_prompt_is_asked_for() -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}>>{% endif %}"
    assert template(source).render(HELLO) == "hello>>"
    assert template(source).render(HELLO, add_generation_prompt=False) == "hello"


def test_helpers_that_templates_expect() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ {'ü': [1]} | tojson }}{{ strftime_now('%Y')|length }}"
    )
    assert template(source).render([{"role": "skip", "content": "x"}, *HELLO]) == 'hello{"ü": [1]}4'


def test_a_template_that_refuses_is_the_clients_fault_and_says_why() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(HELLO)
    with pytest.raises(InvalidRequest, match="cannot render"):
        template("{{ messages[0]['content'] + 1 }}").render(HELLO)


def test_messages_cannot_reach_out_of_the_sandbox() -> None:
    with pytest.raises(InvalidRequest):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(HELLO)


def test_a_clients_variable_may_have_any_name() -> None:
    extra = {"self": 1, "environment": 2, "thinking": "hard"}
    assert template("{{ thinking }} {{ environment }}").render(HELLO, extra=extra) == "hard 2"


def test_a_final_message_to_go_on_with_ends_where_its_text_ends() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "The answer is "}]
    assert template(source).render(messages, continue_final_message=True) == "<user>hello</><assistant>The answer is "


@pytest.mark.parametrize("text", ["<", "end", "|>", "assistant", "hello", "a"])
def test_a_text_that_stands_in_the_templates_own_words_too(text: str) -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end of {{ m.role }}|>{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": text}]
    rendered = template(source).render(messages, continue_final_message=True)
    assert rendered == f"<|user|>hello<|end of user|><|assistant|>{text}"


def test_a_last_message_that_cannot_be_gone_on_with() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for content, complaint in (("", "must have text"), ("hi", "leaves out the last")):
        with pytest.raises(InvalidRequest, match=complaint):
            template(source).render([*HELLO, {"role": "assistant", "content": content}], continue_final_message=True)


def test_a_template_for_tools_is_used_for_tools_alone() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {})
    assert both.render(HELLO) == "plain"
    assert both.render(HELLO, tools=[{"name": "weather"}]) == "weather"


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(str(tmp_path)) is None
    settings = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = ChatTemplate.from_folder(str(tmp_path))
    assert found is not None
    assert found.render(HELLO) == "config </s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    found = ChatTemplate.from_folder(str(tmp_path))
    assert found is not None
    assert found.render(HELLO) == "file"


def test_a_template_that_does_not_compile_is_the_operators_fault() -> None:
    with pytest.raises(ConfigurationError, match="does not compile"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": [5]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b"\xff"),
    ],
)
def test_files_that_hold_no_template_are_the_operators_fault(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigurationError, match=file):
        ChatTemplate.from_folder(str(tmp_path))
