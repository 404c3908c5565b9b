import pytest
from megatron_harness import megatron_process


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron's groups in this one process, for the tests of a module."""
    store = tmp_path_factory.mktemp("store") / "rendezvous"
    with megatron_process(str(store)):
        yield
