"""Label ids as Cityscapes defines them (cityscapesscripts/helpers/labels.py), those drawn here."""

EGO_VEHICLE = 1
OUT_OF_ROI = 3
STATIC = 4
ROAD = 7
SIDEWALK = 8
BUILDING = 11
POLE = 17
TRAFFIC_SIGN = 20
VEGETATION = 21
TERRAIN = 22
SKY = 23
PERSON = 24
CAR = 26
BUS = 28

DRAWN_IDS = (
    EGO_VEHICLE,
    OUT_OF_ROI,
    STATIC,
    ROAD,
    SIDEWALK,
    BUILDING,
    POLE,
    TRAFFIC_SIGN,
    VEGETATION,
    TERRAIN,
    SKY,
    PERSON,
    CAR,
    BUS,
)
