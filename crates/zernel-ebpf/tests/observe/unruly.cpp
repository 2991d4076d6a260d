// A program that does to its stack and to itself what probes find hard: it throws through frames around
// probed calls, leaves a probed call by longjmp, looks at its own stack from a signal handler,
// forks, executes and ends threads. Any of that going wrong ends it with something other than 0.

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <execinfo.h>
#include <poll.h>
#include <stdexcept>
#include <string>
#include <sys/time.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using Function = int (*)(...);

static Function launch, synchronize, allocate, release, set_current;
static std::uint64_t kernel, context;
static sigjmp_buf away;
static volatile std::sig_atomic_t jump_armed;
static volatile std::sig_atomic_t frames;

static Function find(void *library, const char *name)
{
	void *found = dlsym(library, name);
	if (!found)
		throw std::runtime_error(name);
	return reinterpret_cast<Function>(found);
}

static void check(int result, const char *what)
{
	if (result)
		throw std::runtime_error(std::string(what) + " " + std::to_string(result));
}

static void use()
{
	std::uint64_t address = 0;
	for (int i = 0; i < 20; i++)
		check(launch(kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr), "launch");
	check(allocate(&address, std::uint64_t{4096}), "allocate");
	check(release(address), "free");
	check(synchronize(nullptr), "synchronize");
}

// Exceptions pass frames that have just been in the driver.
static void throw_from(int depth)
{
	use();
	if (depth == 0)
		throw std::logic_error("expected");
	throw_from(depth - 1);
}

static void unwind()
{
	try {
		throw_from(3);
	} catch (const std::logic_error &) {
		return;
	}
	throw std::runtime_error("the exception was lost");
}

// Profilers do this to whatever is running.
static void on_profile(int)
{
	void *stack[32];
	frames = backtrace(stack, 32);
}

static void on_jump(int)
{
	if (jump_armed) {
		jump_armed = 0;
		siglongjmp(away, 1);
	}
}

// Leaves the driver in the middle of a call. What the driver may hold then it never gives back, so this
// is the last thing a program does with it.
static void jump_out()
{
	if (sigsetjmp(away, 1) == 0) {
		itimerval soon{};
		soon.it_value.tv_usec = 300;
		jump_armed = 1;
		setitimer(ITIMER_REAL, &soon, nullptr);
		for (;;)
			check(synchronize(nullptr), "synchronize");
	}
}

template <typename Child> static void in_child(Child child)
{
	pid_t pid = fork();
	if (pid == 0) {
		child();
		_exit(0);
	}
	int status = 0;
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
		throw std::runtime_error("a child ended with " + std::to_string(status));
}

static void open(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);
	if (!library)
		throw std::runtime_error(dlerror());
	std::uint64_t module = 0;
	check(find(library, "cuInit")(0), "cuInit");
	check(find(library, "cuDevicePrimaryCtxRetain")(&context, 0), "context");
	set_current = find(library, "cuCtxSetCurrent");
	check(set_current(context), "context");
	check(find(library, "cuModuleLoadData")(&module, "softgpu kernel nothing 1\n"), "module");
	check(find(library, "cuModuleGetFunction")(&kernel, module, "nothing"), "function");
	launch = find(library, "cuLaunchKernel");
	synchronize = find(library, "cuStreamSynchronize");
	allocate = find(library, "cuMemAlloc_v2");
	release = find(library, "cuMemFree_v2");
}

static bool is_over()
{
	pollfd input{0, POLLIN, 0};
	return poll(&input, 1, 0) != 0;
}

int main(int count, char **arguments)
{
	const char *path = arguments[1];
	try {
		open(path);
		if (count > 2) { // executed by itself
			std::signal(SIGALRM, on_jump);
			unwind();
			jump_out();
			_exit(0);
		}
		void *warm[1];
		backtrace(warm, 1);
		std::signal(SIGPROF, on_profile);
		itimerval often{{0, 997}, {0, 997}};
		setitimer(ITIMER_PROF, &often, nullptr);
		while (!is_over()) {
			usleep(2000); // the probes' owner needs some time, too
			for (int i = 0; i < 20; i++)
				unwind();
			std::thread([] {
				check(set_current(context), "context");
				unwind();
			}).join();
			in_child([&] { execl("/proc/self/exe", arguments[0], path, "again", nullptr); });
			// A forked child cannot use the device. The call that fails is still a call.
			in_child([] { synchronize(nullptr); });
		}
	} catch (const std::exception &problem) {
		std::fprintf(stderr, "unruly: %s\n", problem.what());
		return 1;
	}
	return 0;
}
