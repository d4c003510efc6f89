"""Runs the steps of a Containerfile in a Debian of debootstrap, then a command in what they made:

    python -m tests.chroot FOLDER [--containerfile Containerfile.cpu] [-- COMMAND]

It needs root, debootstrap and Debian's mirror. The host's pip settings hold, and the folders that they
name are there. FOLDER is made, and left as it is; a second call goes on with the command.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUITE = "bookworm"
MIRRORED = ("/opt/pypi", "/opt/pypi-more", "/opt/wheels")  # that pip may be told of
COPIED = {  # of the host; certificates under another name, since packages write theirs
    "/etc/resolv.conf": "etc/resolv.conf",
    "/etc/pip.conf": "etc/pip.conf",
    "/etc/ssl/certs/ca-certificates.crt": "certificates_of_the_host.crt",
}
MOUNTS = ("proc", "sys", "dev")
PASSED = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def steps_of(text: str) -> Iterator[tuple[str, str]]:
    """Returns instruction and arguments of each line of a Containerfile; one may go on over several."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip() and not line.startswith("#"):
            instruction, _, given = line.partition(" ")
            yield instruction, given.strip()


class Chroot:
    """Chroot is a folder that programs take for their whole file system."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
        }
        self.environment |= {
            name: value for name, value in os.environ.items() if name.startswith(PASSED)
        }
        for name in ("PIP_CERT", "SSL_CERT_FILE"):
            self.environment[name] = "/certificates_of_the_host.crt"
        self.folder = "/"

    def run(self, command: str) -> None:
        """Runs a shell's command in it, with the host's devices, in mounts of its own that end with it."""
        mounts = [f"mount --rbind /{name} {self.root}/{name}" for name in MOUNTS]
        for folder in MIRRORED:
            if Path(folder).is_dir():
                mounts.append(f"mkdir -p {self.root}{folder}")
                mounts.append(f"mount --bind {folder} {self.root}{folder}")
        inside = f"cd {self.folder} && {command}"
        mounts.append(f"exec chroot {self.root} /bin/sh -ec {shlex.quote(inside)}")
        script = " && ".join(mounts)
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
            env=self.environment,
            check=True,
        )

    def take(self, instruction: str, given: str, source: Path) -> None:
        """Takes a step of a Containerfile; `source` is the folder that it copies from."""
        if instruction == "RUN":
            self.run(given)
        elif instruction == "ENV":
            for pair in shlex.split(given):
                name, _, value = pair.partition("=")
                self.environment[name] = value.replace("$PATH", self.environment["PATH"])
        elif instruction == "COPY":
            copied, target = given.split()
            self._copy(source, copied, self.root / target.lstrip("/"))
        elif instruction == "WORKDIR":
            self.folder = given
        elif instruction != "FROM":
            raise ValueError(f"{instruction} is no step that is known here.")

    def _copy(self, source: Path, copied: str, target: Path) -> None:
        """Copies what git would: an image is built from a clone."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard", copied],
            cwd=source,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            file = target / (name if copied == "." else str(Path(name).relative_to(copied)))
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, file, follow_symlinks=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--containerfile", type=Path, default=Path("Containerfile.cpu"))
    parser.add_argument("command", nargs="*", default=["rftmega", "train", "--help"])
    given = parser.parse_args()
    root = given.folder.resolve()
    chroot, made = Chroot(root), root / ".made"
    if not root.exists():
        subprocess.run(["debootstrap", "--variant=minbase", SUITE, str(root)], check=True)
        for name, target in COPIED.items():
            if Path(name).is_file():
                shutil.copy(name, root / target)
    for instruction, arguments in steps_of(given.containerfile.read_text()):
        if made.exists() and instruction in ("RUN", "COPY"):
            continue
        sys.stderr.write(f"{instruction} {arguments}\n")
        chroot.take(instruction, arguments, Path.cwd())
    made.touch()
    chroot.run(shlex.join(given.command))


if __name__ == "__main__":
    main()
