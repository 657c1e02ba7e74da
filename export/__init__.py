"""`pydflash.export`: the place of ONNX export, which this version does not have yet.

Importing it needs neither torch nor onnx.
"""
