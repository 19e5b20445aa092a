"""Map espeak-ng's English mnemonics to an inventory of 45 phones with ASCII names."""

SILENCE = "SIL"

# Rhotic and centring vowels (AR OR EHR IHR) stay single phones, as espeak-ng sounds them as one.
_MNEMONICS = {
    SILENCE: "_ _: _! _|",
    "AA": "A: 0 O2 A~",
    "AE": "a aa",
    "AH": "V",
    "AO": "O: O",
    "AR": "A@",
    "AW": "aU",
    "AX": "@ @- @2 @5 a#",
    "AY": "aI aI2 aI@ aI3",
    "B": "b",
    "CH": "tS",
    "D": "d d#",
    "DH": "D",
    "EH": "E E2 e",
    "EHR": "e@",
    "ER": "3: 3 VR IR",
    "EY": "eI",
    "F": "f",
    "G": "g",
    "HH": "h",
    "IH": "I I2 I#",
    "IHR": "i@ i@3",
    "IY": "i: i i2",
    "JH": "dZ",
    "K": "k x",
    "L": "l l# @L",
    "M": "m m-",
    "N": "n n-",
    "NG": "N",
    "OR": "O@ o@ U@",
    "OW": "oU",
    "OY": "OI",
    "P": "p",
    "R": "r r-",
    "S": "s",
    "SH": "S",
    "T": "t t2 t# t[ ?",
    "TH": "T",
    "UH": "U",
    "UW": "u: u",
    "V": "v",
    "W": "w w#",
    "Y": "j",
    "Z": "z z#",
    "ZH": "Z",
}
PHONES = tuple(_MNEMONICS)
_NAMES = {mnemonic: name for name, some in _MNEMONICS.items() for mnemonic in some.split()}
_STRESS_MARKS = str.maketrans("", "", "',%=;")


def phone_name(mnemonic: str) -> str | None:
    """Name the phone of an espeak-ng mnemonic; None if it is only a stress or palatal mark.

    Raises ValueError for a mnemonic that the inventory lacks.
    """
    bare = mnemonic.translate(_STRESS_MARKS)
    if bare and bare not in _NAMES:
        raise ValueError(f"espeak-ng phoneme {mnemonic!r}: not in jobs/synthesis/phones.py, add it")
    return _NAMES.get(bare)
