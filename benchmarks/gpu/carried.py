"""Packs the packages that an offline GPU machine lacks for this benchmark into one small archive:
python -m benchmarks.gpu.carried TARGET [--there FILE] [--architecture 90]

FILE lists the packages that the machine has, one per line (requirements/gpu_machine.txt). The
others of requirements/cuda.txt are downloaded as wheels for Python 3.12, without those that no part
imports. GPU code for other architectures is overwritten with zeros, which compress to nothing:
vLLM's libraries shrink from 600 MB to 10 MB. TARGET/site.tar.xz holds a folder `site`; unpack it
there, and put it on PYTHONPATH.

`python3.12 -m benchmarks.gpu.carried --check` imports every part and lists what is missing. Run it
first, in an environment with the machine's packages and `site` on PYTHONPATH. Without a GPU the one
module that may fail is vLLM's allocator, which needs libcuda.so.1.
"""

import argparse
import importlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MAGIC = 0xBA55ED50  # header of a container of GPU code (CUDA's fatbinary.h)
CUBIN = 2  # kind of an entry: code of one architecture; 1 is PTX
PYTHON = "3.12"
GLIBC = (5, 12, 17, 24, 27, 28, 31, 34, 35)  # pip matches each tag by itself
NEVER = re.compile(  # of requirements/cuda.txt: large, and imported by no part
    r"nvidia-|cuda-|nccl|flashinfer|tilelang|z3-solver|torch|triton|quack|humming|tokenspeed|pynvvideo|instanttensor|nvtx"
    r"|playwright|ruff|mypy|librt|ast-serialize|greenlet|execnet"
)
MORE = ("gguf==0.19.0", "trl==1.16.0")  # in addition to requirements/cuda.txt
UNUSED = (  # of the unpacked wheels
    "bin",
    "anthropic/types/beta",
    "mistral_common/data",
    "pycountry/locales",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/entrypoints/serve/instrumentator/static",
)
CHECKED = (
    "rftmega.runtime.device.before_megatron",
    "megatron.core",
    "transformers",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.device_allocator.cumem",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.lora.model_manager",
    "rftmega.run.train",
    "rftmega.rollout.engines.vllm",
    "trl.trainer.grpo_trainer",
    "datasets",
    "gguf",
    *(
        f"benchmarks.gpu.{name}"
        for name in (
            *("completions", "engine", "features", "log_probs", "loop", "mfu"),
            *("offload", "pretrained", "push"),
        )
    ),
    *(f"tests.gpu.test_{name}" for name in ("eight_bits", "few_bits", "policy", "routes")),
)


class Entry(NamedTuple):
    """Entry is one piece of GPU code in a library's bytes."""

    start: int  # offset of its header
    header: int  # bytes
    payload: int  # bytes
    kind: int
    architecture: int  # 90 is Hopper


def entries(library: bytes) -> Iterator[Entry]:
    """Yields the GPU code that nvcc embedded in a library: containers with a header of 16 bytes,
    and entries whose headers contain their size.
    """
    at = 0
    while (at := library.find(struct.pack("<I", MAGIC), at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", library, at)
        if (version, header) != (1, 16):
            at += 4
            continue
        place, at = at + header, at + header + size
        while place < at:
            kind, _, own, payload = struct.unpack_from("<HHIQ", library, place)
            (architecture,) = struct.unpack_from("<I", library, place + 28)
            yield Entry(place, own, payload, kind, architecture)
            place += own + payload


def reduced(
    library: bytes, architecture: int, keep: Callable[[bytes], bool] = lambda code: True
) -> bytes:
    """Returns the library with zeros in place of GPU code for other architectures, of PTX, and of
    code that `keep` rejects. Offsets and sizes are unchanged, so that it loads as before.
    """
    found = bytearray(library)
    for entry in entries(library):
        start = entry.start + entry.header
        code = slice(start, start + entry.payload)
        used = entry.kind == CUBIN and entry.architecture == architecture
        if not (used and keep(library[code])):
            found[code] = bytes(entry.payload)
    return bytes(found)


def of_common_heads(code: bytes) -> bool:
    """Returns whether code of FlashAttention 3 is for bfloat16 and heads of 64 or 128,
    or for all.
    """
    names = sorted(set(re.findall(rb"\.text\.(\w+)", code)))
    told = subprocess.run(["c++filt"], input=b"\n".join(names), capture_output=True, check=True)
    text = told.stdout.decode()
    heads = re.findall(
        r"MainloopFwdSm90<\d+, cute::tuple<[^>]*>[^>]*>[^>]*> *>, "
        r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> *>, (\d+), cutlass::(\w+)",
        text,
    )
    if not heads:
        return "FwdSm90" not in text
    return any(
        kind == "bfloat16_t" and keys == values and keys in ("64", "128")
        for keys, values, kind in heads
    )


def pins(needed: str, there: str) -> list[str]:
    """Returns the pins of `needed` whose packages the machine lacks; both texts have one package
    per line.
    """
    has = {_name(line) for line in there.splitlines() if _is_pin(line)}
    lines = [line.strip() for line in needed.splitlines() if _is_pin(line)]
    return [line for line in lines if _name(line) not in has and not NEVER.match(_name(line))]


def _is_pin(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("#", "-"))


def _name(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>; ]", pin.strip())[0]).lower()


def download(wanted: list[str], folder: Path) -> list[Path]:
    """Downloads the wheels into a folder. Raises CalledProcessError if the index lacks one for the
    machine.
    """
    platforms = [f"manylinux_2_{version}_x86_64" for version in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"),
            *(part for name in platforms for part in ("--platform", name)),
            *("--dest", str(folder), *wanted),
        ],
        check=True,
    )
    return sorted(folder.glob("*.whl"))


def pack(target: Path, there: str, architecture: int) -> Path:
    """Writes TARGET/site.tar.xz and returns it; TARGET/site and TARGET/wheels stay."""
    needed = (ROOT / "requirements/cuda.txt").read_text()
    wheels, site = target / "wheels", target / "site"
    wheels.mkdir(parents=True, exist_ok=True)
    found = download([*pins(needed, there), *MORE], wheels)
    shutil.rmtree(site, ignore_errors=True)
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for name in UNUSED:
        path = site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for library in site.rglob("*.so"):
        code = library.read_bytes()
        keep = of_common_heads if "_fa3_" in library.name else lambda code: True
        if (smaller := reduced(code, architecture, keep)) != code:
            library.write_bytes(smaller)
    with tarfile.open(target / "site.tar.xz", "w:xz") as archive:
        archive.add(site, "site")
    return target / "site.tar.xz"


def unimportable() -> dict[str, str]:
    """Returns the modules of CHECKED that can't be imported here, with the reason."""
    found = {}
    for name in CHECKED:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library built for another version may raise anything
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, nargs="?", default=Path("runs/carried"))
    parser.add_argument("--there", type=Path, default=ROOT / "requirements/gpu_machine.txt")
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("--check", action="store_true", help="import the parts here; pack nothing")
    given = parser.parse_args()
    if given.check:
        missing = unimportable()
        sys.stdout.write("".join(f"{name}: {why}\n" for name, why in missing.items()))
        return 1 if missing else 0
    made = pack(given.target, given.there.read_text(), given.architecture)
    sys.stdout.write(f"{made}: {made.stat().st_size / 2**20:.1f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
