"""The tool, a calculator: after `<calc>12*(3+4)</calc>`, the model reads `<result>84</result>` and goes on.

A turn ends where a call does (`stop` in config.yaml). Treat what a model writes as untrusted input: `evaluate` knows
numbers and operators and nothing else.
"""

from __future__ import annotations

import re

from rollgraph.rl.calculator import CalculatorError, evaluate
from rollgraph.types import Prompt

CALL = re.compile(r"<calc>((?:(?!<calc>).)*)</calc>", re.DOTALL)


def reply(text: str, prompt: Prompt) -> str | None:
    """What the model reads next, after all of the text so far; None if it has called nothing and is finished."""
    calls = CALL.findall(text.rpartition("</result>")[2])
    if not calls:
        return None
    try:
        result = str(evaluate(calls[-1]))
    except CalculatorError as error:
        result = f"error: {error}"
    return f"<result>{result}</result>"
