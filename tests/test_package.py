"""What `import fp4mega` promises."""

import subprocess
import sys

import pytest

import fp4mega


def test_import_is_lazy():
    code = "import sys, fp4mega; assert 'torch' not in sys.modules; fp4mega.attention_func; assert 'torch' in sys.modules; assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_exist():
    for name in fp4mega.__all__:
        assert getattr(fp4mega, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = fp4mega.__getattr__("attention")
