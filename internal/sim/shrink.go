package sim

// Shrink looks for a smaller run that fails, too: with fewer kinds of faults, then with a shorter storm. It returns the
// options of the smallest one that it found and its result, with the history; o must fail.
func Shrink(o Options) (Options, Result) {
	o.Trace = false
	r := Run(o)
	smaller := func(next Options) bool {
		if got := Run(next); got.Err != nil {
			o, r = next, got
			return true
		}
		return false
	}
	for again := true; again; {
		again = false
		for i := range faultNames {
			next := o
			if next.Off |= 1 << i; r.Faults&(1<<i) != 0 && smaller(next) {
				again = true
			}
		}
	}
	if o.Events <= 0 {
		o.Events = DefaultEvents
	}
	for cut := o.Events / 2; cut >= 50; cut /= 2 {
		for next := o; o.Events > cut; next = o {
			if next.Events -= cut; !smaller(next) {
				break
			}
		}
	}
	o.Trace = true
	return o, Run(o)
}
