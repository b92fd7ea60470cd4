from tests.runtime.fakes import impatient, store_here  # noqa: F401 - fixtures
