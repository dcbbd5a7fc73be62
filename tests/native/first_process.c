/* The first process of the emulated machine: runs the programs below /tests one after the other, says how each
   ended, and switches the machine off. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void run(const char *name) {
    pid_t child = fork();
    if (child == 0) {
        execl(name, name, (char *)NULL);
        _exit(127);
    }
    int status = 127 << 8;
    waitpid(child, &status, 0);
    printf("ended %s %d\n", name, WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
}

int main(void) {
    struct dirent **found;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int n = chdir("/tests") == 0 ? scandir(".", &found, NULL, alphasort) : 0;
    for (int i = 0; i < n; i++)
        if (found[i]->d_name[0] != '.') run(found[i]->d_name);
    tcdrain(STDOUT_FILENO); /* what was printed has to leave before the lights go out */
    sleep(1);
    reboot(RB_POWER_OFF);
    for (;;) pause();
}
