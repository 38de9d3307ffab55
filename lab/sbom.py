"""Writes what an image is made of as SPDX 2.3: every wheel with its version, licence and checksum. python -m lab.sbom FOLDER"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any


def package(wheel: Path) -> dict[str, Any]:
    """One wheel as SPDX describes a package; what its metadata does not say is NOASSERTION."""
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = (name for name in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        about = HeaderParser().parsestr(content.read(metadata).decode("utf-8"))
    name, version = str(about["Name"]), str(about["Version"])
    return {
        "SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", name),
        "name": name,
        "versionInfo": version,
        "packageFileName": wheel.name,
        "downloadLocation": "NOASSERTION",
        "licenseDeclared": str(about["License-Expression"] or "NOASSERTION"),
        "licenseConcluded": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": hashlib.sha256(wheel.read_bytes()).hexdigest()}],
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}",
            }
        ],
    }


def bill(folder: Path, version: str, created: str) -> dict[str, Any]:
    """The whole document: what plimsoll's image brings beside its base."""
    packages = [package(wheel) for wheel in sorted(folder.glob("*.whl"))]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"plimsoll-{version}",
        "documentNamespace": f"https://github.com/plimsoll-line/plimsoll/sbom/{version}",
        "creationInfo": {"created": created, "creators": ["Tool: plimsoll lab.sbom"]},
        "packages": packages,
        "relationships": [
            {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": each["SPDXID"]}
            for each in packages
        ],
    }


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1]), sys.argv[2], sys.argv[3]), indent=1))
