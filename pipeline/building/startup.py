"""What a build decides and prepares beside its first windows: compiled kernels, the tokenizer engine, its proof.

A fast engine takes a second or two to load and, once for a tokenizer, a proof of some 15 s; the reference encodes 2.6
MB/s a core meanwhile. So a corpus that the reference finishes sooner never sees a fast engine, and what builds leave to
the reference for want of a proof is counted: when it would have paid, the proof runs, beside the build that is due.
"""

from collections.abc import Callable, Iterable
from threading import Thread

from pipeline.documents.encoder import EngineChoice
from pipeline.documents.engines import ENGINES, REFERENCE
from pipeline.documents.proof import Proof, ProofProcess, add_waited, kept_proof
from pipeline.packing.kernels import cache_note
from pipeline.packing.warm_up import compile_kernels, kernels_compiled
from shards.schema import Layout

SMALL_BYTES = 8 << 20  # a corpus up to this size is packed before compiling would have paid
LOAD_BYTES = 6 << 20  # what the reference encodes in the time that a fast engine takes to load
PROOF_BYTES = 48 << 20  # what it encodes in the time of a proof

Say = Callable[[str], None]


def start_compiling(layout: Layout, on_message: Say) -> Thread:
    """Compile or load the packing kernels while the first windows are read; workers wait for it when they pack.

    Args:
        layout: Types of the columns that rows are written in.
        on_message: Told what takes long, and where machine code is kept if not in the usual places.
    """

    def run() -> None:
        if not kernels_compiled():
            on_message("compiling the packing kernels, once on this machine: about ten seconds, beside reading")
            if note := cache_note():
                on_message(f"{note}.")
        compile_kernels(layout)

    thread = Thread(target=run, name="compiling", daemon=True)
    thread.start()
    return thread


class EngineTrust:
    """Which fast engines a build may use, and what proves them.

    Args:
        contents: What encoders are made of (`TokenizerImage.content`): one, or two where sources differ in
            `parse_special`.
        asked: What the user asked for: auto, or a key of ENGINES.
        raw_bytes: Size of the corpus; None where it is not known.
        workers: Processes that share it.
        on_message: Told what people should know.

    Raises:
        TokenizerError: There is no such engine.
    """

    def __init__(
        self, contents: Iterable[bytes], asked: str, raw_bytes: int | None, workers: int, on_message: Say
    ) -> None:
        self.contents, self.on_message = list(contents), on_message
        self.processes: dict[bytes, ProofProcess] = {}
        self.choice = self._choose(EngineChoice.named(asked), raw_bytes, workers)

    def _choose(self, asked: EngineChoice, raw_bytes: int | None, workers: int) -> EngineChoice:
        usable = tuple(name for name in asked.engines if self._may_be_used(name, asked.required))
        if not usable:
            return EngineChoice()
        proven = all(kept_proof(content, usable[0]) for content in self.contents)
        if asked.required:
            small = raw_bytes is not None and raw_bytes <= PROOF_BYTES
            if not proven and not small:
                self._start(usable)
            return EngineChoice(engines=usable, required=True, compare_all=not proven and small)
        if raw_bytes is None:  # as long as it may end soon, the reference encodes
            return EngineChoice(engines=usable, patience_chars=LOAD_BYTES if proven else PROOF_BYTES)
        if raw_bytes <= LOAD_BYTES * workers:
            return EngineChoice()
        if not proven:
            if max(add_waited(content, raw_bytes) for content in self.contents) <= PROOF_BYTES:
                return EngineChoice()
            self._start(usable)
        return EngineChoice(engines=usable)

    def _may_be_used(self, engine: str, required: bool) -> bool:
        """Whether nothing is known against an engine; said where the user asked for it."""
        if not ENGINES[engine].version:
            return required  # the encoder says that it is not installed
        for content in self.contents:
            proof = kept_proof(content, engine)
            if proof is not None and proof.result == "differs":
                if required:
                    self.on_message(f"{proof.sentence()}; {REFERENCE} is used")
                return False
            if proof is not None and proof.result == "cannot" and not required:
                return False
        return True

    def _start(self, engines: tuple[str, ...]) -> None:
        self.on_message(
            f"comparing {engines[0]} with {REFERENCE} on every character, once for this tokenizer, beside the build"
        )
        for content in self.contents:
            self.processes[content] = ProofProcess(content, engines)

    def settle(self, used: Iterable[tuple[str, str]]) -> list[Proof]:
        """Return the proofs of the engines that wrote windows, waiting for those that are not there yet.

        Args:
            used: Names of engines and their versions; for one that is not the version installed there is no proof.
        """
        settled: list[Proof] = []
        for content in self.contents:
            for engine, version in sorted(set(used)):
                if version == ENGINES[engine].version:
                    settled.append(kept_proof(content, engine) or self._find(content, engine))
        return settled

    def _find(self, content: bytes, engine: str) -> Proof:
        """Return a proof that is not kept yet: that of the process beside the build, or of one that starts now."""
        for started in (self.processes.get(content), None):
            process = started
            if process is None:
                self.on_message(f"comparing {engine} with {REFERENCE} on every character, once for this tokenizer")
                process = self.processes[content] = ProofProcess(content, (engine,))
            for proof in process.result():
                if proof.engine == engine:
                    self.on_message(proof.sentence())
                    return proof
        raise AssertionError("a proof process answers for the engine it was given")

    def stop(self) -> None:
        """End proofs that nobody waits for."""
        for process in self.processes.values():
            process.stop()
