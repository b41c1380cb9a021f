"""The page of the service in headless Chromium, with real events."""

from __future__ import annotations

import json
import re
import unittest
from importlib import resources

from support.browser import CHROMIUM, Browser
from support.serving import Serving, needs_serve

THREE = ((90, 70), (130, 50), (170, 60), (180, 95), (150, 125), (165, 140), (190, 175), (85, 200))
DONE = "document.querySelectorAll('#bars li').length === 5 && !busy"


class Page(unittest.TestCase):
    def test_it_needs_nothing_from_elsewhere(self) -> None:
        text = resources.files("dlsys.serve.rest").joinpath("page.html").read_text("utf-8")
        self.assertEqual(re.findall(r"(?:https?:)?//\w[^\s\"']*\.\w+", text), [])
        self.assertNotRegex(text, r"<script src|<link rel=\"stylesheet|@import|url\(")


@needs_serve
@unittest.skipIf(CHROMIUM is None, "not here: Chromium")
class Events(Serving):
    browser: Browser

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.browser = cls.enterClassContext(Browser())

    def setUp(self) -> None:
        self.browser.open(f"{self.server.url}/")
        box = self.browser.value("JSON.stringify(paper.getBoundingClientRect())")
        self.left, self.top = (json.loads(box)[side] for side in ("x", "y"))

    def text(self, name: str) -> str:
        return self.browser.value(f"document.getElementById({name!r}).textContent")

    def check_answered(self) -> None:
        self.browser.wait(DONE)
        self.assertRegex(self.text("timing"), r"^\d, [\d.]+ %, by digits in \d+ ms$")
        self.assertEqual(self.text("error"), "")
        source = self.browser.value("document.getElementById('map').src")
        self.assertTrue(source.startswith("data:image/png"))
        self.assertRegex(self.browser.value("document.getElementById('map').alt"), "^Grad-CAM for")

    def test_a_mouse_draws(self) -> None:
        self.browser.drag([(self.left + x, self.top + y) for x, y in THREE])
        self.check_answered()
        self.browser.value("document.getElementById('clear').click()")
        self.assertEqual(self.text("timing"), "Nothing is drawn yet.")

    def test_a_finger_draws(self) -> None:
        self.browser.swipe([(self.left + x, self.top + y) for x, y in THREE])
        self.check_answered()

    def test_keys_draw_and_clear(self) -> None:
        self.browser.value("paper.focus()")
        for key in (" ", *["ArrowDown"] * 9, *["ArrowRight"] * 5):
            self.browser.press(key)
        self.check_answered()
        self.browser.press("Delete")
        self.assertEqual(self.text("timing"), "Nothing is drawn yet.")

    def test_an_image_is_dropped(self) -> None:
        self.browser.value(
            """new Promise((done) => paper.toBlob(done)).then((blob) => {
              const files = new DataTransfer();
              files.items.add(new File([blob], "a.png", { type: "image/png" }));
              dispatchEvent(new DragEvent("drop", { dataTransfer: files, cancelable: true }));
            })"""
        )
        self.check_answered()

    def test_both_themes(self) -> None:
        color = "getComputedStyle(document.body).backgroundColor"
        found = []
        for theme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": theme}]
            self.browser.call("Emulation.setEmulatedMedia", features=features)
            found.append(self.browser.value(color))
        self.assertEqual(found, ["rgb(244, 246, 248)", "rgb(18, 21, 25)"])


if __name__ == "__main__":
    unittest.main()
