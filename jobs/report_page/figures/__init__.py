"""Draw the charts of the page, each for a desktop and for a phone, as inline SVG."""
