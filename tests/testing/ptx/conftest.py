def pytest_collection_modifyitems(config, items):
    """The larger matrix runs only when asked for: python -m pytest -m ptx_matrix tests/testing/ptx."""
    if "ptx_matrix" in (config.getoption("-m") or ""):
        return
    large = [item for item in items if item.get_closest_marker("ptx_matrix")]
    if large:
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]
