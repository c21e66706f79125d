"""Crosswire: a message hub for EMP, eMQP, Relink, Bond Epoxy and MicroMsg2."""

__version__ = "0.1.0"
