"""What process tests share beside `tests/conftest.py`."""

from guarded import guard

__all__ = ["guard"]
