"""Whether a fast engine gives the reference's ids for every character there is.

All 1,112,064 Unicode scalar values are encoded by both engines, each alone and between a letter and `'S`, where engines
with another version of the Unicode tables split differently. That takes the reference about 15 s, so it happens once
for a tokenizer and the versions of both engines, beside a build, and the answer is kept, sealed by a checksum.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.caches import cache_directory
from pipeline.documents.engines import ENGINES, REFERENCE, Encode, is_engine_fault, single_threaded
from shards.errors import FormatError, PackError
from shards.publish import seal, unseal

FORMS = ("{}", "a{}'S")
BATCH = 1 << 14
NUM_SCALARS = 0x110000 - 0x800


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What comparing an engine with the reference on every character gave."""

    engine: str
    version: str
    reference: str
    "Version of the reference."
    result: str
    "equal, differs, or cannot (hold this tokenizer)."
    scalars: int
    "Unicode scalar values that were compared."
    example: str = ""
    "The first text with other ids."
    seconds: float = 0.0

    def sentence(self) -> str:
        """Say what was found, for people."""
        both = f"{self.engine} {self.version}", f"{REFERENCE} {self.reference}"
        if self.result == "cannot":
            return f"{both[0]} cannot hold this tokenizer"
        same = "gives the ids of" if self.result == "equal" else "gives other ids than"
        where = f" on {self.scalars:,} characters" if self.result == "equal" else f" for {self.example!a}"
        return f"{both[0]} {same} {both[1]}{where} ({self.seconds:.0f} s, once for these versions and this tokenizer)"


def scalar_values() -> Iterator[str]:
    """Yield every Unicode scalar value, in order: all code points but surrogates."""
    yield from (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)


def prove(content: bytes, engine: str, scalars: Iterable[str] | None = None) -> Proof:
    """Compare an engine with the reference.

    Args:
        content: The tokenizer.json that both encode with.
        engine: A key of ENGINES.
        scalars: Characters to compare; all there are by default.
    """
    begin = time.perf_counter()
    compared, example, result = 0, "", "equal"
    reference = ENGINES[REFERENCE].open(content)
    try:
        fast = ENGINES[engine].open(content)
    except BaseException as error:
        if not is_engine_fault(error):
            raise
        result = "cannot"
    else:
        rest = iter(scalar_values() if scalars is None else scalars)
        while batch := list(islice(rest, BATCH)):
            for form in FORMS:
                example = example or _first_difference(reference, fast, [form.format(one) for one in batch])
            compared += len(batch)
            if example:
                result = "differs"
                break
    return Proof(
        engine=engine,
        version=ENGINES[engine].version,
        reference=ENGINES[REFERENCE].version,
        result=result,
        scalars=compared,
        example=example,
        seconds=round(time.perf_counter() - begin, 1),
    )


def prove_first(content: bytes, engines: Sequence[str]) -> list[Proof]:
    """Compare the first of the engines that can hold a tokenizer; return what was found of all that were tried."""
    found: list[Proof] = []
    for engine in engines:
        found.append(prove(content, engine))
        if found[-1].result != "cannot":
            break
    return found


def _first_difference(reference: Encode, fast: Encode, texts: list[str]) -> str:
    """Return the first text that two engines encode differently; empty where there is none."""
    expected, offsets = reference(texts)
    try:
        ids, ends = fast(texts)
    except BaseException as error:
        if not is_engine_fault(error):
            raise
        return texts[0]
    if np.array_equal(ids, expected) and np.array_equal(ends, offsets):
        return ""
    for index, text in enumerate(texts):
        if not np.array_equal(ids[ends[index] : ends[index + 1]], expected[offsets[index] : offsets[index + 1]]):
            return text
    return texts[0]


def kept_proof(content: bytes, engine: str) -> Proof | None:
    """Return what was found before for this tokenizer and the versions that are installed; None where nothing was."""
    file = _file(content, engine)
    if file is None or not file.is_file():
        return None
    try:
        return Proof(**unseal(file.read_bytes(), str(file), "F1"))
    except (FormatError, OSError, TypeError):  # damaged: found again
        return None


def keep_proof(content: bytes, proof: Proof) -> None:
    """Keep what was found for the next build, where there is a place."""
    file = _file(content, proof.engine)
    if file is not None:
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(seal(asdict(proof)))
        scratch.replace(file)


def add_waited(content: bytes, raw_bytes: int) -> int:
    """Count corpus bytes that builds left to the reference for want of a proof; return all so far, these included."""
    directory = cache_directory("proofs")
    if directory is None:
        return raw_bytes
    file = directory / f"{_digest(content)}.waited"
    try:
        before = int(file.read_text())
    except (OSError, ValueError):
        before = 0
    file.write_text(str(before + raw_bytes))
    return before + raw_bytes


def _file(content: bytes, engine: str) -> Path | None:
    directory = cache_directory("proofs")
    versions = f"{engine}-{ENGINES[engine].version}-{REFERENCE}-{ENGINES[REFERENCE].version}"
    return None if directory is None else directory / f"{_digest(content)}-{versions}.json"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


class ProofProcess:
    """A proof that a process of its own finds, beside a build.

    Args:
        content: The tokenizer.json.
        engines: Keys of ENGINES; the first that can hold the tokenizer is compared.
    """

    def __init__(self, content: bytes, engines: Sequence[str]) -> None:
        self.content = content
        self._proofs: list[Proof] | None = None
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.documents.proof", *engines],
                stdin=file,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )

    def result(self) -> list[Proof]:
        """Wait for what is found about the engines that were tried, keep it, and return it.

        Raises:
            PackError: The process died.
        """
        if self._proofs is None:
            answer, _ = self._process.communicate()
            if self._process.returncode:
                raise PackError(
                    f"tokenizer_engine: the process that compares it with {REFERENCE} died "
                    f"({self._process.returncode}); expected it to finish. Use {REFERENCE}."
                )
            self._proofs = [Proof(**record) for record in json.loads(answer)]
            for proof in self._proofs:
                keep_proof(self.content, proof)
        return self._proofs

    def stop(self) -> None:
        """End the process: nobody wants the answer any more."""
        if self._proofs is None:
            self._process.kill()
            self._process.communicate()


if __name__ == "__main__":
    os.nice(5)
    single_threaded()
    print(json.dumps([asdict(proof) for proof in prove_first(sys.stdin.buffer.read(), sys.argv[1:])]))
