"""Runs the ``gradcombine`` command as ``python -m gradcombine``."""

from gradcombine.verify.main import main

if __name__ == "__main__":
    main()
