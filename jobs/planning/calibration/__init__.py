"""Calibrate a plan with published throughputs and with those of this machine."""
