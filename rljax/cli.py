"""The command ``rljax``. Its first word names a program, which is run with the remaining words.

This module needs only the standard library, and a program is imported only when it is called. So the
command starts at once, and ``rljax serve`` works in a server's environment, where there is no JAX.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import rljax
from rljax.errors import ConfigError, import_for, run_cli


class Command(NamedTuple):
    """A program of the package."""

    module: str  # the module of the program; its ``main`` takes the remaining words and returns the exit status
    summary: str  # one line for ``rljax --help``
    options: str = "{}Arguments"  # its dataclass of options, where {} is the command's name, capitalised; empty: none


COMMANDS = {
    "train": Command("rljax.train", "Trains a policy: rljax train CONFIG.yaml [--a.b value ...]", "Config"),
    "evaluate": Command("rljax.evaluate", "Measures the accuracy of a model or of a run on one dataset."),
    "compare": Command("rljax.commands.compare", "Compares log-probabilities of the same tokens between engines."),
    "view": Command("rljax.commands.view", "Makes one HTML page of a token dump or a run, token by token."),
    "diagnose": Command("rljax.commands.diagnose", "Names the cause of a mismatch or collapse, and the remedies."),
    "replay": Command("rljax.commands.replay", "Shows what the length-triggered schedule would do on a training log."),
    "plot": Command("rljax.commands.plot", "Plots one run, or several runs in the same panels."),
    "prepare": Command("rljax.commands.prepare", "Makes a training file from problems: filters, counts, scores."),
    "export": Command("rljax.commands.export", "Writes a checkpoint as a Hugging Face directory."),
    "serve": Command("rljax.commands.serve", "Serves a model with vLLM or SGLang, ready for weight updates.", ""),
    "config": Command("rljax.commands.config", "Prints the settings that a run would use.", "Config"),
    "docs": Command("rljax.commands.docs", "Prints a page of the documentation: rljax docs PAGE", ""),
    "accept": Command("rljax.commands.accept", "Checks a model and its vLLM server before a long run: is it right?"),
    "check": Command("rljax.commands.check", "Checks this machine, from driver and kernels to a training step."),
}
USAGE = "usage: rljax COMMAND [words of the command]"
COMPLETION = "--print-completion"
SHELLS = ("bash", "zsh", "fish")
_BASH = """_rljax() {{
  local words
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _rljax rljax"""
_ZSH = "autoload -U compinit bashcompinit && compinit && bashcompinit\n"  # zsh runs bash's script


def help_text() -> str:
    """Returns the text of ``rljax --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    title = "RL fine-tuning of language models in JAX, with the training-inference mismatch measured."
    end = "rljax COMMAND --help explains a command; rljax --version prints the version.\n"
    end += f"{COMPLETION} {{{','.join(SHELLS)}}} prints a script for the completion of words by the shell."
    return "\n".join([USAGE, "", title, "", *lines, "", end])


def find(name: str) -> Command:
    """Returns the command of this name. Raises ConfigError, with a suggestion, when there is none."""
    if name in COMMANDS:
        return COMMANDS[name]
    similar = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"commands: {', '.join(COMMANDS)}"
    raise ConfigError(f"unknown command {name}; {advice}")


def load(name: str, command: Command) -> Any:
    """Imports the module of a command. Raises ConfigError when a package that it needs is not installed."""
    return import_for(f"rljax {name}", command.module, "train")


def print_completion(shell: str) -> None:
    """Prints the script by which a shell completes commands and options.

    Raises ConfigError if ``shell`` is not one of ``SHELLS``.
    """
    if shell not in SHELLS:
        raise ConfigError(f"{COMPLETION}: expected one of {', '.join(SHELLS)}, got {shell or 'nothing'}")
    option_words = load("completion", Command("rljax.run.options", "")).option_words
    words = {"": " ".join(COMMANDS)}
    for name, command in COMMANDS.items():
        if command.options:
            words[name] = " ".join(option_words(getattr(load(name, command), command.options.format(name.title()))))
    if shell == "fish":
        when = {name: f"__fish_seen_subcommand_from {name}" if name else "__fish_use_subcommand" for name in words}
        print("\n".join(f"complete -c rljax -n '{when[name]}' -a '{each}'" for name, each in words.items()))
        return
    patterns = {name: f"*:{name}" if name else "1:*" for name in words}
    cases = "\n".join(f'    {patterns[name]}) words="{each}" ;;' for name, each in words.items())
    print((_ZSH if shell == "zsh" else "") + _BASH.format(cases=cases))


def main(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status.

    Raises ConfigError if there is no such command or shell, or a package that the command needs is not installed.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(rljax.__version__)
        return 0
    if argv[0] == COMPLETION:
        print_completion(argv[1] if len(argv) > 1 else "")
        return 0
    command = find(argv[0])
    status: int = load(argv[0], command).main(argv[1:])
    return status


def cli() -> int:
    """Runs ``main`` on the words of the command line; returns the exit status."""
    return run_cli(main)


if __name__ == "__main__":
    sys.exit(cli())
