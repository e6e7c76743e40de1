"""Rows as models compute them: padded, packed, or split over context-parallel ranks."""
