"""A store on loopback: moto's server stands for S3."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest

BUCKET = "datasets"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """The file system of a fresh store; s3:// URLs lead there."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        filesystem = fsspec.filesystem("s3")
        filesystem.mkdir(BUCKET)
        yield filesystem
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
