#include "core/snapshot.h"
#include "test.h"
