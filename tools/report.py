"""Show a run, or several side by side, as one HTML page: curves, times, validation, samples with pictures, settings.

python tools/report.py runs/demo                  # runs/demo/report.html; training writes it too, at its end
python tools/report.py runs/a runs/b              # runs/report.html, curves on top of each other
python tools/report.py runs/demo --watch          # written again while the run goes on
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from r1.report.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
