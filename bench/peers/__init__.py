"""The whole model beside other engines, in one run in which they take turns."""
