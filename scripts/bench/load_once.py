"""Load a checkpoint, and print as JSON what that took: load_once.py ours|theirs DIR NORM

"loaded" and "first" are the seconds until the model is loaded and until it has computed a token, imports left out;
"peak_loading" and "peak" the most memory until then, in bytes beyond that of the imports. Linux only.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import safetensors.torch  # noqa: F401 (both import it when they load)
import torch


def make_loader(which: str, folder: Path, norm: str) -> Callable[[], Any]:
    """A function that loads the model, once everything that it needs is imported."""
    if which == "theirs":
        from transformers import LlamaForCausalLM

        return lambda: LlamaForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")
    from kernels import load_backend
    from model.checkpoint.load import load_checkpoint

    cpu = torch.device("cpu")
    backend = load_backend(norm, cpu)
    return lambda: load_checkpoint(folder, backend, cpu)


def memory(key: str) -> int:
    """A size in bytes out of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    load = make_loader(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    with torch.inference_mode():
        before = memory("VmRSS")
        # Reset the peak VmHWM; ru_maxrss would start from that of the process which started this one.
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        model = load()
        found = {"loaded": time.perf_counter() - start, "peak_loading": memory("VmHWM") - before}
        model(torch.tensor([[1]]))
        found |= {"first": time.perf_counter() - start, "peak": memory("VmHWM") - before}
    print(json.dumps(found))
