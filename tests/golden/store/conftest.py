"""A store of every kind: on a disk, in memory, in an object store (a server of its own), behind a renaming driver."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from assay.golden.store import Store

KINDS = ("disk", "memory", "s3", "renaming")


class RenamingFileSystem(LocalFileSystem):
    """A disk behind a driver of which the store knows nothing but that it can rename."""

    protocol = "renaming"


fsspec.register_implementation("renaming", RenamingFileSystem, clobber=True)


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, str]]:
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "made-up", "secret": "made-up"}
    S3FileSystem(**options).mkdir("goldens")
    yield options
    server.stop()


@pytest.fixture
def new_store(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Store]:

    def make(kind: str) -> Store:
        name = uuid4().hex
        if kind == "s3":
            return Store(f"s3://goldens/{name}/a", request.getfixturevalue("s3_options"))
        return Store(
            {"disk": f"{tmp_path}/{name}", "memory": f"memory://{name}/a"}.get(kind, f"{kind}://{tmp_path}/{name}")
        )

    return make


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, new_store: Callable[[str], Store]) -> Store:
    return new_store(request.param)
