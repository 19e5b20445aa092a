"""One rank's replica: its trained parameters, its optimizer's state, and what must be equal."""
