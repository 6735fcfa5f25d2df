"""Conversations that a chat template refuses because a system message is not the first."""

from typing import Any

import pytest

from jdisagg.errors import InvalidRequestError
from models.chat_template import ChatTemplate

SHOWN = "{{ m.role }}:{{ m.content if m.content is string else m.content | tojson }}|"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    f"{SHOWN}{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"
)
LENIENT = f"{{% for m in messages %}}{SHOWN}{{% endfor %}}"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    f"{{% endif %}}{SHOWN}{{% endfor %}}"
)


def said(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


def rendered(template: str, *messages: dict[str, Any], answers: bool = True) -> str:
    return ChatTemplate({"default": template}, {}).render(messages, add_generation_prompt=answers)


TURN = (said("user", "a"), said("assistant", "b"), said("system", "c"))


def test_a_template_with_the_system_first_is_shown_all_of_them_there() -> None:
    assert rendered(STRICT, *TURN) == "system:c|user:a|assistant:b|assistant:"
    first = said("system", "s")
    assert rendered(STRICT, first, *TURN, TURN[0]).startswith("system:s\n\nc|user:a|assistant:b|u")
    assert rendered(STRICT, first, first, TURN[0]).startswith("system:s\n\ns|user:a|")


def test_other_templates_are_shown_a_system_message_in_its_place() -> None:
    assert rendered(LENIENT, *TURN) == "user:a|assistant:b|system:c|"


def test_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "p"}]
    joined = rendered(STRICT, said("system", parts), said("user", "a"), said("system", "c"))
    assert joined.startswith("system:p\nc|user:a|")


def test_what_is_refused_also_after_joining_has_the_template_s_reason() -> None:
    with pytest.raises(InvalidRequestError, match="no system"):
        rendered(WITHOUT_SYSTEM, *TURN)


def test_a_system_message_that_the_answer_continues_stays_last() -> None:
    template = ChatTemplate({"default": STRICT}, {})
    with pytest.raises(InvalidRequestError, match="at the beginning"):
        template.render(TURN, add_generation_prompt=False, continue_final_message=True)
