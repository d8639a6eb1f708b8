"""A process apart: what it dies of is said with what it was about to do, and the next call starts another one."""

import os
import signal
import time

import pytest

from scripts.proving.apart import Apart, Died, about_to


def echo(value):
    about_to(f"saying {value}")
    return value


def segfault():
    about_to("x (6, 48)")
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    os._exit(3)


def fail():
    print("what it printed")
    raise KeyboardInterrupt


def hang():
    about_to("x (7, 48)")
    time.sleep(60)


@pytest.fixture
def apart(tmp_path):
    noticed = []
    process = Apart(noticed.append, str(tmp_path / "log.txt"))
    process.noticed = noticed
    yield process
    process.close()


def test_a_process_that_dies_is_a_finding_and_the_next_call_has_another(apart, tmp_path):
    apart.warm_up(echo, "dropped")
    assert apart.call(echo, 7) == 7
    assert apart.noticed == ["saying dropped", "saying 7"]
    with pytest.raises(Died, match=r"^a segmentation fault, at x \(6, 48\)$") as death:
        apart.call(segfault)
    assert (death.value.how, death.value.doing) == ("a segmentation fault", "x (6, 48)")
    with pytest.raises(Died, match=r"^the process ended with exit code 3$"):
        apart.call(leave)
    with pytest.raises(Died, match="exit code"):
        apart.call(fail)
    assert "what it printed" in (tmp_path / "log.txt").read_text()
    with pytest.raises(Died, match=r"^it did not end within 3 s, at x \(7, 48\)$"):
        apart.call(hang, limit_s=3)
    assert apart.call(echo, 8) == 8
