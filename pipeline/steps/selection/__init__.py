"""Data selection (paper 003 IV-B1), pass by pass over the metadata."""
