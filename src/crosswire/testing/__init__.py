"""For tests of programs that use Crosswire, and of Crosswire itself."""
