"""The table of known formats: one row for each way to write calls, and one for each kind of reasoning."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.api.formats.braced_calls import BracedCalls
from tandem.api.formats.calls import CallFormat, Layout
from tandem.api.formats.json_calls import JsonCalls
from tandem.api.formats.named_calls import NamedCalls
from tandem.api.formats.pythonic_calls import PythonicCalls
from tandem.api.formats.reasoning import ReasoningFormat
from tandem.api.formats.tagged_calls import TaggedCalls
from tandem.api.settings import ReasoningName, ToolFormat

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEP = "<｜tool▁sep｜>"
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)  # fmt: skip
_KIMI_ARGUMENT = "<|tool_call_argument_begin|>"
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def _mistral(layout: Layout, *, as_list: bool) -> NamedCalls:
    """Mistral's calls. Older models write a list of objects, newer ones names and arguments; both are
    read."""
    return NamedCalls(
        ("[TOOL_CALLS]",),
        layout,
        head=r"\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\](?P<id>[\w\-]+))?(?:\[ARGS\])?\s*",
        written_head="{}[ARGS]",
        instead=JsonCalls(("[TOOL_CALLS]",), layout),
        writes_instead=as_list,
    )


def _sectioned(
    marks: tuple[str, str, str, str],
    before_arguments: str,
    head: str,
    written_head: str,
    around: tuple[str, str, str] | None = None,
) -> NamedCalls:
    """Calls in a section. `marks`: of the section's begin and end, and of each call's. `around`: what is written before, after and
    between calls, where it is more than the marks."""
    begin, end, call_begin, call_end = marks
    return NamedCalls(
        (begin,),
        Layout(begin, *(around or (call_begin, call_end, "")), end, marks=(*marks, before_arguments)),
        head=head,
        written_head=written_head,
        call_begin=call_begin,
        call_end=call_end,
        end=end,
    )


def _between(tag: str) -> Layout:
    """Each call is between the tags, on lines of its own."""
    begin, end = f"<{tag}>", f"</{tag}>"
    return Layout(call_begin=f"{begin}\n", call_end=f"\n{end}", between="\n", marks=(begin, end))


def _function_tags(tag: str, written_value: str, written_close: str) -> TaggedCalls:
    return TaggedCalls(
        (f"<{tag}>",),
        _between(tag),
        end=f"</{tag}>",
        call_open=r"<function=(?P<name>[^>\s]+)>",
        call_close="</function>",
        value_open=r"<parameter=(?P<key>[^>\s]+)>",
        value_close="</parameter>",
        written_call="<function={}>\n",
        written_value=written_value,
        written_close=written_close,
        newlines=True,
    )


_DSML = "｜DSML｜"

CALLS: Mapping[ToolFormat, CallFormat] = {
    ToolFormat.HERMES: JsonCalls(("<tool_call>",), _between("tool_call"), end="</tool_call>"),
    ToolFormat.LLAMA3: JsonCalls(
        ("<|python_tag|>",), Layout(between="; ", marks=("<|python_tag|>",), last=True), key="parameters", opening="{"
    ),
    ToolFormat.MISTRAL: _mistral(
        Layout(begin="[TOOL_CALLS][", between=", ", end="]", marks=_MISTRAL, last=True), as_list=True
    ),
    ToolFormat.MISTRAL_NAMED: _mistral(Layout(call_begin="[TOOL_CALLS]", marks=_MISTRAL, last=True), as_list=False),
    ToolFormat.GRANITE: JsonCalls(
        ("<|tool_call|>", "<tool_call>"),
        Layout(begin="<|tool_call|>[", between=", ", end="]", marks=("<|tool_call|>",), last=True),
    ),
    ToolFormat.PHI4: JsonCalls(
        ("<|tool_call|>", "functools"),
        Layout(begin="functools[", between=", ", end="]", marks=("<|tool_call|>",), last=True),
        end="<|/tool_call|>",
    ),
    ToolFormat.MINIMAX_M1: JsonCalls(
        ("<tool_calls>",),
        Layout(begin="<tool_calls>\n", between="\n", end="\n</tool_calls>", marks=("<tool_calls>", "</tool_calls>")),
        end="</tool_calls>",
    ),
    ToolFormat.PYTHONIC: PythonicCalls(
        ("<|python_start|>",),
        Layout(begin="[", between=", ", end="]", marks=("<|python_start|>", "<|python_end|>"), last=True),
        end="<|python_end|>",
        opening="[",
    ),
    ToolFormat.LFM2: PythonicCalls(
        ("<|tool_call_start|>",),
        Layout(
            begin="<|tool_call_start|>[",
            between=", ",
            end="]<|tool_call_end|>",
            marks=("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        end="<|tool_call_end|>",
    ),
    ToolFormat.OLMO3: PythonicCalls(
        ("<function_calls>",),
        Layout(begin="<function_calls>\n", between="\n", end="\n</function_calls>"),
        end="</function_calls>",
    ),
    ToolFormat.DEEPSEEK_V3: _sectioned(
        _DEEPSEEK,
        _SEP,
        rf"\s*(?:function\s*)?{_SEP}\s*(?P<name>[\w.\-]+)\s*(?:```json)?\s*",
        "{}\n```json\n",
        around=(f"{_DEEPSEEK[2]}function{_SEP}", f"\n```{_DEEPSEEK[3]}", "\n"),
    ),
    ToolFormat.DEEPSEEK_V31: _sectioned(_DEEPSEEK, _SEP, rf"\s*(?P<name>[\w.\-]+)\s*{_SEP}\s*", "{}" + _SEP),
    ToolFormat.KIMI_K2: _sectioned(
        _KIMI,
        _KIMI_ARGUMENT,
        rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*{re.escape(_KIMI_ARGUMENT)}\s*",
        "functions.{}:0" + _KIMI_ARGUMENT,
    ),
    ToolFormat.QWEN3_CODER: _function_tags("tool_call", "<parameter={}>\n", "\n</parameter>\n"),
    ToolFormat.SEED_OSS: _function_tags("seed:tool_call", "<parameter={}>", "</parameter>\n"),
    ToolFormat.GLM: TaggedCalls(
        ("<tool_call>",),
        Layout(
            call_begin="<tool_call>",
            call_end="</tool_call>",
            between="\n",
            marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        end="</tool_call>",
        call_open=r"(?P<name>[^\s<{]+)\s*(?=<)",
        call_close="",
        value_open=r"<arg_key>\s*(?P<key>[^<]+?)\s*</arg_key>\s*<arg_value>",
        value_close="</arg_value>",
        written_call="{}\n",
        written_value="<arg_key>{}</arg_key>\n<arg_value>",
        written_close="</arg_value>\n",
    ),
    ToolFormat.MINIMAX: TaggedCalls(
        ("<minimax:tool_call>",),
        Layout(
            begin="<minimax:tool_call>\n",
            call_end="\n",
            end="</minimax:tool_call>",
            marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        end="</minimax:tool_call>",
        call_open=r"""<invoke name=["']?(?P<name>[^>"']+)["']?\s*>""",
        call_close="</invoke>",
        value_open=r"""<parameter name=["']?(?P<key>[^>"']+)["']?\s*>""",
        value_close="</parameter>",
        written_call='<invoke name="{}">\n',
        written_value='<parameter name="{}">',
        written_close="</parameter>\n",
    ),
    ToolFormat.DEEPSEEK_V32: TaggedCalls(
        (f"<{_DSML}function_calls>",),
        Layout(begin=f"<{_DSML}function_calls>\n", call_end="\n", end=f"</{_DSML}function_calls>", marks=(_DSML,)),
        end=f"</{_DSML}function_calls>",
        call_open=rf'<{_DSML}invoke name="(?P<name>[^>"]+)"\s*>',
        call_close=f"</{_DSML}invoke>",
        value_open=rf'<{_DSML}parameter name="(?P<key>[^>"]+)"[^>]*>',
        value_close=f"</{_DSML}parameter>",
        written_call=f'<{_DSML}invoke name="{{}}">\n',
        written_value=f'<{_DSML}parameter name="{{}}" string="{{}}">',
        written_close=f"</{_DSML}parameter>\n",
    ),
    ToolFormat.FUNCTION_GEMMA: BracedCalls(
        ("<start_function_call>",),
        Layout(
            call_begin="<start_function_call>",
            call_end="<end_function_call>",
            marks=("<start_function_call>", "<end_function_call>", "<escape>"),
        ),
        end="<end_function_call>",
        quote="<escape>",
    ),
    ToolFormat.GEMMA4: BracedCalls(
        ("<|tool_call>",),
        Layout(call_begin="<|tool_call>", call_end="<tool_call|>", marks=("<|tool_call>", "<tool_call|>", '<|"|>')),
        end="<tool_call|>",
        quote='<|"|>',
    ),
}

# Texts that a template must contain for a format, when it writes no call to learn from. The first row that
# fits counts.
MENTIONED: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (ToolFormat.HARMONY, ("<|channel|>", "to=functions.")),
    (ToolFormat.DEEPSEEK_V32, (f"{_DSML}invoke",)),
    (ToolFormat.DEEPSEEK_V3, (_DEEPSEEK[0], "```json")),
    (ToolFormat.DEEPSEEK_V31, (_DEEPSEEK[0],)),
    (ToolFormat.KIMI_K2, (_KIMI[0],)),
    (ToolFormat.MINIMAX, ("<minimax:tool_call>",)),
    (ToolFormat.MINIMAX_M1, ("<tool_calls>",)),
    (ToolFormat.SEED_OSS, ("<seed:tool_call>",)),
    (ToolFormat.QWEN3_CODER, ("<tool_call>", "<function=")),
    (ToolFormat.GLM, ("<tool_call>", "<arg_key>")),
    (ToolFormat.GEMMA4, ("<|tool_call>",)),
    (ToolFormat.FUNCTION_GEMMA, ("<start_function_call>",)),
    (ToolFormat.LFM2, ("<|tool_call_start|>",)),
    (ToolFormat.LFM2, ("<|tool_list_start|>",)),
    (ToolFormat.OLMO3, ("<function_calls>",)),
    (ToolFormat.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (ToolFormat.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolFormat.HERMES, ("<tool_call>",)),
    (ToolFormat.PHI4, ("functools",)),
    (ToolFormat.PHI4, ("<|/tool_call|>",)),
    (ToolFormat.GRANITE, ("<|tool_call|>",)),
    (ToolFormat.PYTHONIC, ("<|python_start|>",)),
    (ToolFormat.PYTHONIC, ("[func_name1(",)),
    (ToolFormat.LLAMA3, ("<|python_tag|>",)),
    (ToolFormat.LLAMA3, ('"parameters"',)),
)

REASONING: Mapping[ReasoningName, ReasoningFormat] = {
    ReasoningName.THINK: ReasoningFormat("<think>", "</think>"),
    ReasoningName.SEED_THINK: ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningName.MISTRAL: ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningName.GEMMA4: ReasoningFormat("<|channel>thought\n", "<channel|>"),
    ReasoningName.COHERE: ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningName.KIMI: ReasoningFormat("◁think▷", "◁/think▷"),
    ReasoningName.GRANITE: ReasoningFormat("Here is my thought process:", "Here is my response:"),
}
