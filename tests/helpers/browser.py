"""A browser without a window, and one page in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
HAS_BROWSER = CHROMIUM is not None and DRIVER is not None
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1400,900",
)  # fmt: skip


def start_browser(profile: Path) -> Any:
    """Return a driver of Chromium that keeps its files in `profile`; `quit()` ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(120)
    return driver


class Page:
    """A page in the browser."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def get(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def at(self, place: str, *, wheel: int = 0) -> None:
        """Put the pointer where `window.chunkmem` says that something is, and turn the wheel there."""
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        point = self.get(f"chunkmem.{place}")
        x, y = int(point["x"]), int(point["y"])
        actions = ActionChains(self.driver, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(x, y)
        actions.perform()
        if wheel:
            origin = ScrollOrigin.from_viewport(x, y)
            ActionChains(self.driver).scroll_from_origin(origin, 0, wheel).perform()
        self.settle()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()
        self.settle()

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()
        self.settle()

    def drag(self, start: tuple[int, int], by: tuple[int, int]) -> None:
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver, duration=0)
        pointer = actions.w3c_actions.pointer_action
        pointer.move_to_location(*start)
        pointer.pointer_down()
        pointer.move_to_location(start[0] + by[0], start[1] + by[1])
        pointer.pointer_up()
        actions.perform()
        self.settle()

    @property
    def range_ns(self) -> tuple[float, float]:
        low, high = self.get("[chunkmem.view.from, chunkmem.view.to]")
        return low, high

    @property
    def tip(self) -> list[str]:
        """The lines beside the pointer; none if nothing is told."""
        text = self.get("tip.hidden ? '' : tip.firstChild.innerText + '\\n' + tip.lastChild.textContent")
        return str(text).splitlines()

    @property
    def figures(self) -> str:
        return str(self.get("document.querySelector(`.figures[data-of=${chunkmem.view.mode}]`).innerText"))
