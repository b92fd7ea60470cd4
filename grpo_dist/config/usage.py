"""The text of --help."""

from __future__ import annotations

from grpo_dist.config.command import AnyCommand, default_options


def usage(command: AnyCommand) -> str:
    """The help text: the command, its groups, examples, and where the keys are explained."""
    called = f"python -m {command.module}"
    lines = [f"usage: {called} [GROUP=OPTION ...] [KEY=VALUE ...] [--quiet]", ""]
    lines += [f"{command.purpose} Groups change the defaults, and keys change both.", ""]
    lines.append("groups (the default is marked *):")
    lines += [line for group in command.group_options() for line in group_lines(command, group)]
    lines += ["", "examples:"]
    for what, overrides in command.examples:
        lines += [f"  # {what}", f"  {called} {overrides}".rstrip()]
    lines += ["", f"every key, with its meaning and default: {' and '.join(map(str, command.files))}"]
    lines.append("--quiet shows nothing but errors: trainer.console=false")
    lines.append("lists are written [a,b], an empty value null, text with = , : [ ] { } as \"key='...'\"")
    return "\n".join(lines)


def group_lines(command: AnyCommand, group: str) -> list[str]:
    """The options of a group with their descriptions; * marks the one that is used where none is chosen."""
    default = default_options(command.file)[group]
    return [
        f" {'*' if default == option else ' '} {f'{group}={option}':<22} {first_comment(command, group, option)}"
        for option in command.group_options()[group]
    ]


def first_comment(command: AnyCommand, group: str, option: str) -> str:
    """The description of a group's option: the first comment of its file."""
    lines = (command.file.parent / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("#").strip() for line in lines if line.startswith("# ") and "@package" not in line)
