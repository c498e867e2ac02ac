"""The tool, a calculator: after `<calc>12*(3+4)</calc>`, the model reads `<result>84</result>` and goes on.

A turn ends where a call ends (`stop` in config.yaml). Treat the model's text as untrusted input: `calculate` accepts
only numbers and operators.
"""

from __future__ import annotations

import re

from rollgraph.rl.calculator import calculate
from rollgraph.types import Prompt

CALL = re.compile(r"<calc>((?:(?!<calc>).)*)</calc>", re.DOTALL)


def reply(text: str, prompt: Prompt) -> str | None:
    """The text that the model reads next, given all text so far; None if it made no call, which ends the rollout."""
    calls = CALL.findall(text.rpartition("</result>")[2])
    if not calls:
        return None
    return f"<result>{calculate(calls[-1])}</result>"
