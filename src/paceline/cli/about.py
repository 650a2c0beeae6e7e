"""``paceline strategies``: the methods, from their own docstrings and fields."""

from __future__ import annotations

import inspect

from paceline.cli.screen import Screen
from paceline.strategies import STRATEGIES, describe, strategy_class


def show_strategies(screen: Screen) -> None:
    """List every method with its one idea and its options."""
    known = [describe(name) for name in STRATEGIES]
    rows = [
        (about["name"], about["summary"], " ".join(o["name"] for o in about["options"]))
        for about in known
    ]
    for name, summary, options in rows:
        screen.say(f"{name:<10} {summary}\n{'':<10} options: {options or 'none'}")
    screen.say("\npaceline strategies NAME explains one of them.")
    screen.emit({"strategies": known})


def show_strategy(screen: Screen, name: str) -> None:
    """Explain one method: its docstring, then its options."""
    about = describe(name)
    screen.say(inspect.getdoc(strategy_class(name)) or "")
    screen.say(f"\nOptions, as {name}(name=value) or --set name=value:\n")
    for option in about["options"]:
        screen.say(f"  {option['name']} ({option['type']}, default {option['default']})")
        screen.say(f"      {option['help']}")
    screen.emit({"strategies": [about]})
