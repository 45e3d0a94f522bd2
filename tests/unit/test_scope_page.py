"""What is shipped of the page: complete, without anything from elsewhere, with the licences of what is in it."""

from __future__ import annotations

import re

from trimtab.scope.server.static_files import FOLDER, INDEX, REFUSED, load

HARMLESS = {"www.w3.org", "svelte.dev"}
"""Namespaces, and where Svelte explains its errors: nothing is loaded from there."""


def test_everything_that_a_page_names_is_there_and_nothing_is_inline() -> None:
    files = load()
    for page in (INDEX, REFUSED):
        text = files[page].content.decode()
        named = re.findall(r'(?:src|href)="([^"]*)"', text)
        assert named
        for name in named:
            assert name.startswith("/"), name
            assert name[1:] in files, name
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text), "the policy forbids it"


def test_nothing_comes_from_elsewhere() -> None:
    hosts = set()
    for path in FOLDER.rglob("*"):
        if path.suffix in (".js", ".css", ".html"):
            hosts |= set(re.findall(r"(?:https?:|[\"'`(])//([\w.-]+\.\w+)", path.read_text(encoding="utf-8")))
    assert hosts <= HARMLESS


def test_licences_of_what_is_bundled_are_beside_it() -> None:
    said = (FOLDER / "licences.txt").read_text(encoding="utf-8")
    bundled = dict(re.findall(r"^([@\w/-]+) \d+\.\d+\.\d+ \((.+)\)$", said, re.MULTILINE))
    assert {"svelte", "uplot"} <= bundled.keys()
    assert set(bundled.values()) == {"MIT"}, "another licence has to be looked at, and named in NOTICE"
    assert said.count("Permission is hereby granted") == len(bundled)


def test_no_file_says_where_it_was_built() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file():
            assert b"node_modules" not in path.read_bytes(), path
