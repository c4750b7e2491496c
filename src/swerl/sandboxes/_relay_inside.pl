# The relay's half inside a sandbox without Python: the same lines as `_relay_inside.py`.
#
# `serve NAME PORT` listens on 127.0.0.1 and goes to the background; `carry NAME` connects its own
# stdin and stdout to that server. Only core modules of Debian's smallest Perl are used.

use strict;
use warnings;
use Errno qw(EAGAIN EINTR);
use Fcntl qw(F_GETFL F_SETFL O_NONBLOCK);
use IO::Select;
use POSIX ();
use Socket;

use constant { WINDOW => 1 << 19, CHUNK => 24 * 1024, MAX_CONNECTIONS => 128, NO_SERVER => 3 };
use constant SO_PEERCRED => 17;

my (%connections, %by_socket, @unacknowledged, $listener, $control, $link);
my ($last, $sent, $received, $must_acknowledge, $greeted) = (0, 0, 0, 0, 0);
my ($link_in, $link_out) = ('', '');

$SIG{PIPE} = 'IGNORE';
my ($mode, $name, $port) = @ARGV;
$mode eq 'serve' ? serve() : carry();

sub to_base64 {    # through uuencode, because the smallest Perl has no MIME::Base64
    my ($data) = @_;
    my $padding = (3 - length($data) % 3) % 3;
    my $text = '';
    while (length $data) {
        my $line = substr(pack('u', substr($data, 0, 45, '')), 1);
        chomp $line;
        $text .= $line;
    }
    $text =~ tr{` -_}{AA-Za-z0-9+/};
    substr($text, -$padding) = '=' x $padding if $padding;
    return $text;
}

sub from_base64 {
    my ($text) = @_;
    $text =~ tr{A-Za-z0-9+/}{}cd;
    $text =~ tr{A-Za-z0-9+/}{ -_};
    my $data = '';
    while (length $text) {
        my $line = substr($text, 0, 60, '');
        $data .= unpack('u', chr(32 + int(length($line) * 3 / 4)) . $line);
    }
    return $data;
}

sub unblock {
    my ($socket) = @_;
    fcntl($socket, F_SETFL, fcntl($socket, F_GETFL, 0) | O_NONBLOCK);
}

sub send_frame {
    my ($kind, $number, $payload) = @_;
    $sent++;
    my $text = "F $sent $kind $number " . (defined $payload ? $payload : '') . "\n";
    push @unacknowledged, [$sent, $text];
    $link_out .= $text if $greeted;
}

sub forget {
    my ($each) = @_;
    delete $by_socket{fileno $each->{socket}};
    delete $connections{$each->{number}};
    close $each->{socket};
}

sub end_if_done {
    my ($each) = @_;
    forget($each) if $each->{read_ended} && $each->{write_ended};
}

sub broke {
    my ($each) = @_;
    return if $!{EAGAIN} || $!{EINTR};
    send_frame('R', $each->{number});
    forget($each);
}

sub on_client {
    accept(my $socket, $listener) or return;
    unblock($socket);
    $last++;
    my $each = { socket => $socket, number => $last, credit => WINDOW, pending => '' };
    $connections{$last} = $each;
    $by_socket{fileno $socket} = $each;
    send_frame('O', $last);
}

sub write_to {
    my ($each) = @_;
    if (length $each->{pending}) {
        my $count = syswrite($each->{socket}, $each->{pending});
        return broke($each) unless defined $count;
        substr($each->{pending}, 0, $count, '');
        send_frame('W', $each->{number}, $count);
    }
    if ($each->{closing} && !length $each->{pending}) {
        shutdown($each->{socket}, 1);
        $each->{write_ended} = 1;
        end_if_done($each);
    }
}

sub read_from {
    my ($each) = @_;
    my $most = $each->{credit} < CHUNK ? $each->{credit} : CHUNK;
    my $count = sysread($each->{socket}, my $data, $most);
    return broke($each) unless defined $count;
    if ($count) {
        $each->{credit} -= $count;
        send_frame('D', $each->{number}, to_base64($data));
    } else {
        $each->{read_ended} = 1;
        send_frame('E', $each->{number});
        end_if_done($each);
    }
}

sub handle {
    my ($kind, $number, $payload) = @_;
    my $each = $connections{$number} or return;
    if ($kind eq 'D') { $each->{pending} .= from_base64($payload) }
    elsif ($kind eq 'W') { $each->{credit} += $payload }
    elsif ($kind eq 'E') { $each->{closing} = 1 }
    elsif ($kind eq 'R') {
        setsockopt($each->{socket}, SOL_SOCKET, SO_LINGER, pack('ii', 1, 0));
        forget($each);
    }
}

sub drop_link {
    close $link if $link;
    ($link, $greeted, $link_in, $link_out) = (undef, 0, '', '');
}

sub acknowledge {
    my ($upto) = @_;
    shift @unacknowledged while @unacknowledged && $unacknowledged[0][0] <= $upto;
}

sub take_line {
    my ($word, @rest) = split / /, $_[0], -1;
    if ($word eq 'A' || $word eq 'H') {
        acknowledge($rest[0]);
        if ($word eq 'H') {
            $greeted = 1;
            $link_out .= $_->[1] for @unacknowledged;
        }
        return 1;
    }
    $must_acknowledge = 1;
    if ($word eq 'F' && $rest[0] == $received + 1) {
        $received++;
        handle(@rest[1 .. 3]);
    }
    return $word ne 'F' || $rest[0] <= $received;
}

sub on_link_read {
    my $count = sysread($link, $link_in, 1 << 16, length $link_in);
    return if !defined $count && ($!{EAGAIN} || $!{EINTR});
    return drop_link() unless $count;
    while ($link_in =~ s/\A([^\n]*)\n//) {
        return drop_link() unless take_line($1);
    }
}

sub on_link_write {
    if ($must_acknowledge) {
        $must_acknowledge = 0;
        $link_out .= "A $received\n";
    }
    my $count = syswrite($link, $link_out, 1 << 16);
    return drop_link() unless defined $count || $!{EAGAIN} || $!{EINTR};
    substr($link_out, 0, $count || 0, '');
}

sub on_control {
    accept(my $socket, $control) or return;
    my (undef, $user) = unpack 'iii', getsockopt($socket, SOL_SOCKET, SO_PEERCRED);
    return close $socket if $user != $>;
    drop_link();
    unblock($socket);
    $link = $socket;
    $link_out = "H $received\n";
}

sub poll_once {    # wait for events and handle each
    my ($reads, $writes) = (IO::Select->new($control), IO::Select->new);
    $reads->add($listener) if keys(%connections) < MAX_CONNECTIONS;
    if ($link) {
        $reads->add($link);
        $writes->add($link) if $must_acknowledge || length $link_out;
    }
    for my $each (values %connections) {
        $reads->add($each->{socket}) if !$each->{read_ended} && $each->{credit} > 0;
        $writes->add($each->{socket})
            if length $each->{pending} || ($each->{closing} && !$each->{write_ended});
    }
    my ($readable, $writable) = IO::Select->select($reads, $writes, undef);
    for my $socket (@{ $writable || [] }) {
        my $number = fileno $socket;
        next unless defined $number;
        if ($link && $socket == $link) { on_link_write() }
        elsif ($by_socket{$number}) { write_to($by_socket{$number}) }
    }
    for my $socket (@{ $readable || [] }) {
        my $number = fileno $socket;
        next unless defined $number;
        if ($socket == $control) { on_control() }
        elsif ($socket == $listener) { on_client() }
        elsif ($link && $socket == $link) { on_link_read() }
        elsif ($by_socket{$number}) { read_from($by_socket{$number}) }
    }
}

sub serve {
    socket($listener, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
    setsockopt($listener, SOL_SOCKET, SO_REUSEADDR, 1);
    bind($listener, sockaddr_in($port, INADDR_LOOPBACK)) or die "bind: $!\n";
    listen($listener, 128) or die "listen: $!\n";
    unblock($listener);
    socket($control, PF_UNIX, SOCK_STREAM, 0) or die "socket: $!\n";
    bind($control, pack('Sa*', AF_UNIX, "\0$name")) or die "bind: $!\n";
    listen($control, 8) or die "listen: $!\n";
    my ($chosen) = sockaddr_in(getsockname $listener);
    $| = 1;
    print "$chosen\n";
    POSIX::_exit(0) if fork;
    POSIX::setsid();
    POSIX::_exit(0) if fork;
    open STDIN, '<', '/dev/null';
    open STDOUT, '>', '/dev/null';
    open STDERR, '>', '/dev/null';
    poll_once() while 1;
}

sub carry {
    socket(my $server, PF_UNIX, SOCK_STREAM, 0) or POSIX::_exit(NO_SERVER);
    connect($server, pack('Sa*', AF_UNIX, "\0$name")) or POSIX::_exit(NO_SERVER);
    my $child = fork;    # one process a direction, so that neither waits for the other
    my ($from, $to) = $child ? ($server, \*STDOUT) : (\*STDIN, $server);
    while (sysread($from, my $data, 1 << 16)) {
        while (length $data) {
            my $count = syswrite($to, $data);
            last unless $count;
            substr($data, 0, $count, '');
        }
    }
    shutdown($server, 2);
    kill 'KILL', $child if $child;
    POSIX::_exit(0);
}
