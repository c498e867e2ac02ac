"""A calculator, as a text environment (`calculator`) and as a tool for environments of messages (`calculate`).

In the text environment, `<calc>12*(3+4)</calc>` is followed by `<result>84</result>`.

The input is untrusted, because a policy writes it. We walk a syntax tree in which only numbers and operators are
allowed, with limits on all sizes, and never call `eval`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from rollgraph.rl.environment import MultiTurn
from rollgraph.tokenizer import Tokenizer
from rollgraph.types import Prompt

Number = int | float

_MAX_CHARACTERS = 200  # also bounds the depth of the tree
_MAX_BITS = 256
_CHARACTERS = re.compile(r"[0-9eE.+\-*/%() ]*")
_CALL = re.compile(r"<calc>((?:(?!<calc>).)*?)</calc>", re.DOTALL)


class CalculatorError(ValueError):
    """An expression without a value; the policy is told the message."""


def calculator(
    tokenizer: Tokenizer, *, samples_per_prompt: int, max_turns: int = 8, max_tokens: int = 1024
) -> MultiTurn:
    """The text environment; a turn ends at the end of a call."""
    return MultiTurn(
        tokenizer,
        reply,
        samples_per_prompt=samples_per_prompt,
        max_turns=max_turns,
        max_tokens=max_tokens,
        stop=("</calc>",),
    )


def reply(text: str, prompt: Prompt) -> str | None:
    """The result of the last call, unless the text already has it."""
    # The call may not be the end of the text: the token that completes `</calc>` can contain more characters.
    calls = _CALL.findall(text.rpartition("</result>")[2])
    if not calls:
        return None
    return f"<result>{calculate(calls[-1])}</result>"


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as 12*(3+4).

    Returns:
        The value, or an error.
    """
    try:
        return _format_number(evaluate_expression(expression))
    except CalculatorError as error:
        return f"error: {error}"


def evaluate_expression(expression: str) -> Number:
    """The value of an expression of numbers, + - * / // % ** and parentheses, as Python would compute it."""
    if len(expression) > _MAX_CHARACTERS:
        raise CalculatorError("expression too long")
    if not _CHARACTERS.fullmatch(expression):
        raise CalculatorError("only numbers, + - * / // % ** and ( )")
    try:
        return _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("number too large") from None
    except (SyntaxError, MemoryError, RecursionError):  # the parser can run out of its own stack
        raise CalculatorError("invalid syntax") from None


def _evaluate_node(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _check_value(value)
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _check_value(_UNARY[type(op)](_evaluate_node(operand)))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _check_value(_BINARY[type(op)](_evaluate_node(left), _evaluate_node(right)))
    raise CalculatorError("only numbers, + - * / // % ** and ( )")


def _check_value(value: Number) -> Number:
    if isinstance(value, complex):
        raise CalculatorError("not a real number")
    if not math.isfinite(value) or (isinstance(value, int) and value.bit_length() > _MAX_BITS):
        raise CalculatorError("number too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    # Checked before computing it: 9**9**9 has 370 million digits.
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * _MAX_BITS:
        raise CalculatorError("number too large")
    result: Number = base**exponent
    return result


_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _format_number(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"
