"""Corpus to shards: sources, tokenizing, packing, the build and its reports. No torch anywhere."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.building.driver import BuildResult as BuildResult
    from pipeline.building.driver import build as build
    from pipeline.building.progress import Progress as Progress
    from pipeline.building.repacking.repack import repack as repack
    from pipeline.config import BuildConfig as BuildConfig
    from pipeline.config import RecordOptions as RecordOptions
    from pipeline.config import RepackConfig as RepackConfig
    from pipeline.documents.encoder import Encoder as Encoder
    from pipeline.estimate.advisor import estimate_corpus as estimate_corpus
    from pipeline.export.config import DatasetExportConfig as DatasetExportConfig
    from pipeline.export.hub import pull as pull
    from pipeline.export.hub import push as push
    from pipeline.export.run import ExportResult as ExportResult
    from pipeline.export.run import export_dataset as export_dataset
    from pipeline.packing.packers import PACKERS as PACKERS
    from pipeline.packing.packers import Bins as Bins
    from pipeline.packing.packers import pack as pack
    from pipeline.report.inspection import inspect as inspect

_HOMES = {
    "PACKERS": "pipeline.packing.packers",
    "Bins": "pipeline.packing.packers",
    "BuildConfig": "pipeline.config",
    "BuildResult": "pipeline.building.driver",
    "DatasetExportConfig": "pipeline.export.config",
    "Encoder": "pipeline.documents.encoder",
    "ExportResult": "pipeline.export.run",
    "Progress": "pipeline.building.progress",
    "RecordOptions": "pipeline.config",
    "RepackConfig": "pipeline.config",
    "build": "pipeline.building.driver",
    "estimate_corpus": "pipeline.estimate.advisor",
    "export_dataset": "pipeline.export.run",
    "inspect": "pipeline.report.inspection",
    "pack": "pipeline.packing.packers",
    "pull": "pipeline.export.hub",
    "push": "pipeline.export.hub",
    "repack": "pipeline.building.repacking.repack",
}
__all__ = [
    "PACKERS", "Bins", "BuildConfig", "BuildResult", "DatasetExportConfig", "Encoder", "ExportResult", "Progress",
    "RecordOptions", "RepackConfig", "__version__", "build", "estimate_corpus", "export_dataset", "inspect", "pack",
    "pull", "push", "repack",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("shardpack")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
