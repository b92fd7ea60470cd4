"""`grpo-dist export RUN_DIR` writes the model of a checkpoint as a Hugging Face folder, and pushes it to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_dist.assets import check_push, expanded
from grpo_dist.cli.arguments import add_shared, command_parser
from grpo_dist.config.run_code import FLAG
from grpo_dist.errors import ConfigError
from grpo_dist.terminal import show
from grpo_dist.trainer.checkpoint.folder import is_model_of_run, own_checkpoints, step_of
from grpo_dist.trainer.record import EXPORTED


def main(arguments: Sequence[str]) -> int:
    """Export a checkpoint."""
    what = "Write a checkpoint's model as a Hugging Face folder, on CPU. LoRA's factors are merged, and come beside it."
    parser = command_parser("export", what)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's trainer.default_local_dir, or a checkpoint in it")
    add_shared(parser, "--step", FLAG)
    parser.add_argument("--to", metavar="FOLDER", help="to write; default: RUN_DIR/huggingface_step_N")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the weights; default: as the run exports")
    parser.add_argument("--model", metavar="PATH", help="folder or hub name of the run's base model, if it has moved")
    parser.add_argument("--push", metavar="OWNER/NAME", help="push the model, as the run exports it, to the hub")
    parser.add_argument("--public", action="store_true", help="with --push: everybody may see it; default: private")
    options = parser.parse_args(arguments)
    if (options.public and not options.push) or (options.push and (options.to or options.dtype)):
        raise ConfigError("--public goes with --push, and --push without --to and --dtype")
    check_push(options.push, "--push")
    # These load torch and transformers, seconds that --help and a wrong argument do without.
    from grpo_dist.cli.trained import export_checkpoint, exported, push
    from grpo_dist.runs import named_checkpoint, no_checkpoint, saved_run

    run_dir = expanded(options.run_dir)
    checkpoint = named_checkpoint(run_dir, options.step)
    if options.push and (checkpoint or (options.step is None and is_model_of_run(run_dir / EXPORTED, run_dir))):
        config = saved_run(checkpoint or run_dir, options.model, trust=options.trust)
        folder = exported(checkpoint, config) if checkpoint else run_dir / EXPORTED
        push(config, options.push, folder, private=not options.public)
        return 0
    if checkpoint is None:
        raise ConfigError(no_checkpoint(run_dir, options.step))
    run_dir, step = checkpoint.parent, step_of(checkpoint)
    folder = Path(options.to or run_dir / f"huggingface_step_{step}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; remove it, or choose another folder with --to")
    config = saved_run(checkpoint, options.model, trust=options.trust)
    steps = ", ".join(map(str, own_checkpoints(run_dir))) or "none"
    show(f"checkpoints of {run_dir}: steps {steps}; exporting step {step}\n")
    export_checkpoint(checkpoint, config, folder.absolute(), options.dtype or config.export_dtype)
    show(f"wrote {folder}\n")
    return 0
