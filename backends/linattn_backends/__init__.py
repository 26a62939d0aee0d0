"""The backends that ship with linattn, one folder each. They use the plug-in contract only, like anybody else's."""
