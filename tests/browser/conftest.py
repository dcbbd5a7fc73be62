"""A headless Chromium for the browser tests: Debian's, driven through its own chromedriver."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """A page in Chromium, with what it asked for and complained of.

    Screenshots go below ``$KVTRIAL_SCREENSHOTS``, or nowhere.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, address: str, *, width: int = 1200, height: int = 900, scheme: str = "light"
    ) -> None:
        """Load an address at a viewport's width in CSS pixels and a colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.driver.get(address)

    def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        answer: dict[str, Any] = self.driver.execute_cdp_cmd(name, arguments)
        return answer

    def run(self, script: str) -> Any:
        """What a script returns in the page."""
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        """Console messages of level SEVERE and uncaught exceptions since the last call."""
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call, inlined data left out."""
        messages = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
        asked = [m["params"]["request"]["url"] for m in sent]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]

    def screenshot(self, name: str, *, whole: bool = True) -> bytes:
        """PNG of the page, kept as ``name`` where a folder is named for it."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        raw = base64.b64decode(shot["data"])
        if folder := os.environ.get("KVTRIAL_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(raw)
        return raw


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium for all tests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program = shutil.which("chromium") or shutil.which("chromium-browser")
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.fail(
            "Chromium and its driver are needed (Debian: apt install chromium chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new",
        "--no-sandbox",  # containers run as root
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_program))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
