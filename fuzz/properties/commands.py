"""The command line of `bench`: what it would not read or could not write is refused before it measures."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from fuzz.case import Words
from fuzz.prop import holds
from nsa_tools.commands import bench

UNREAD = (
    "--decode --mode both", "--mode=both --decode", "--decode --packed 2", "--decode --graph",
    "--variants nsa --decode", "--from a.json --mode forward", "--decode --chart FOLDER/a",
)  # fmt: skip
UNWRITABLE = ("FOLDER", "FOLDER/none/a.png", f"FOLDER/{300 * 'a'}.png", "FOLDER/taken.png", "FOLDER/taken.svg")


class _Measures(Exception):
    pass


def words() -> st.SearchStrategy[Words]:
    unwritable = st.sampled_from(UNWRITABLE).map("--chart={}".format)
    return st.builds(Words, text=st.one_of(st.sampled_from(UNREAD), unwritable))


@holds("commands.bench refuses first", words, pr=14)
def bench_refuses_first(case: Words) -> None:
    """Status 2 and a line, before shapes are made; nothing is left behind."""
    with tempfile.TemporaryDirectory() as folder, patch.object(bench, "shapes", side_effect=_Measures):
        (Path(folder) / "taken.svg").mkdir()
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                bench.main(["--device=cpu", *case.text.replace("FOLDER", folder).split()])
        except SystemExit as exit:
            assert exit.code == 2 and said.getvalue().count("\n") == 1, said.getvalue()
        except _Measures:
            raise AssertionError(f"{case.text}: taken") from None
        assert [path.name for path in Path(folder).iterdir()] == ["taken.svg"]
